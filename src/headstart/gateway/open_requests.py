"""The choices that have neither finished nor failed, by request."""

from collections.abc import Collection, Iterable, Iterator

from headstart.core.errors import InvariantError
from headstart.gateway.choice_record import ChoiceRecord


class OpenRequests:
    """Looks choices up. Whoever goes through them may end some of them on the way."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[int, ChoiceRecord]] = {}
        self._num_choices = 0

    def __len__(self) -> int:
        return self._num_choices

    def __iter__(self) -> Iterator[ChoiceRecord]:
        """Each choice, unless it has ended when its turn comes: a sink may end others of its request."""
        return _still_open([choice for choices in self._requests.values() for choice in choices.values()])

    def find(self, request_id: str, choice_index: int) -> ChoiceRecord | None:
        choices = self._requests.get(request_id)
        return None if choices is None else choices.get(choice_index)

    def of_request(self, request_id: str) -> Iterator[ChoiceRecord]:
        """As `iter`."""
        return _still_open(list(self._requests.get(request_id, {}).values()))

    def siblings(self, choice: ChoiceRecord) -> Collection[ChoiceRecord]:
        """All choices of its request, itself among them."""
        return self._requests[choice.key[0]].values()

    def add(self, choice: ChoiceRecord) -> None:
        request_id, index = choice.key
        choices = self._requests.setdefault(request_id, {})
        if index in choices:
            raise InvariantError(f"{choice.ref} is unfinished and was added again")
        choices[index] = choice
        self._num_choices += 1

    def remove(self, choice: ChoiceRecord) -> None:
        request_id, index = choice.key
        choices = self._requests[request_id]
        del choices[index]
        if not choices:
            del self._requests[request_id]
        self._num_choices -= 1
        choice.is_open = False


def _still_open(choices: Iterable[ChoiceRecord]) -> Iterator[ChoiceRecord]:
    for choice in choices:
        if choice.is_open:
            yield choice
