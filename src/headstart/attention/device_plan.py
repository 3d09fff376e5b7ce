"""A plan in device memory: fixed addresses, so that a captured graph reads whichever plan was uploaded last."""

import torch

from headstart.attention.plan import ITEM_WIDTH, Plan

_NUM_STAGING = 3  # uploads that may still be on their way while the host fills the next


class DevicePlan:
    """int32 buffers for plans of at most `max_tokens` query tokens and `max_items` items.

    `slot_ptr` is padded: tokens past the plan's have no slots, and come out as zeros.
    """

    def __init__(self, max_tokens: int, max_items: int, device: torch.device | str) -> None:
        self.max_tokens = max_tokens
        self.max_items = max_items
        room = -(-max_tokens // 8) * 8  # every part begins aligned, so that one compiled kernel serves all sizes
        head = 8 + 3 * room + 8
        self._block = torch.zeros(head + max_items * ITEM_WIDTH, dtype=torch.int32, device=device)
        self.count = self._block[0:1]
        self.q_list = self._block[8 : 8 + max_tokens]
        self.pos_of = self._block[8 + room : 8 + room + max_tokens]
        self.slot_ptr = self._block[8 + 2 * room : 9 + 2 * room + max_tokens]
        self.items = self._block[head:]
        self._room = room
        self._head = head
        on_gpu = self._block.is_cuda
        self._staging = [
            torch.zeros(len(self._block), dtype=torch.int32, pin_memory=on_gpu) for _ in range(_NUM_STAGING)
        ]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(_NUM_STAGING)]
        self._turn = 0

    def upload(self, plan: Plan) -> None:
        """Copy `plan` to the device on the current stream, behind what was launched there before.

        Raises ValueError if it is larger than the buffers.
        """
        num_tokens, num_items = len(plan.q_list), len(plan.items)
        if num_tokens > self.max_tokens or num_items > self.max_items:
            raise ValueError(
                f"plan of {num_tokens} tokens, {num_items} items in buffers for {self.max_tokens}, {self.max_items}"
            )
        event, staging = self._copied[self._turn], self._staging[self._turn]
        if event is not None:
            event.synchronize()  # the copy that last read this staging block, three uploads ago
        block = staging.numpy()
        block[0] = num_items
        first = 8
        for column, fill in ((plan.q_list, 0), (plan.pos_of, 0), (plan.slot_ptr, plan.num_slots)):
            width = self._room + 8 * (column is plan.slot_ptr)
            block[first : first + len(column)] = column
            block[first + len(column) : first + width] = fill
            first += width
        used = self._head + num_items * ITEM_WIDTH
        block[self._head : used] = plan.items.ravel()
        self._block[:used].copy_(staging[:used], non_blocking=True)
        if event is not None:
            event.record()
        self._turn = (self._turn + 1) % _NUM_STAGING
