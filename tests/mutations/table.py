"""What is taken away from the source, and which tests must notice."""

from dataclasses import dataclass

SIM = "tests/chaos/test_fence.py"
CHAOS = "tests/chaos/test_chaos.py::test_100_seeds[0]"


@dataclass(frozen=True)
class Mutation:
    name: str
    path: str  # below src/headstart
    before: str  # occurs once
    after: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "unlock: a released lease keeps its path pinned",
        "kv/cache.py",
        "            self._tree.unpin(end)\n            self._order.push(end)",
        "            pass",
        ("tests/unit/kv/test_kv_lease.py",),
    ),
    Mutation(
        "fence: a page under a peer's write is nobody's",
        "kv/ledger.py",
        "self._swap(index, _LEASE, _LEASE_WRITER)",
        "self._swap(index, _LEASE, _LEASE)",
        ("tests/unit/kv/test_kv_writers.py",),
    ),
    Mutation(
        "fence: a cancelled ticket closes without the writer's word",
        "scheduler/tickets.py",
        "        if ticket.phase in (Phase.DONE, Phase.RECEIVED):",
        "        if ticket.phase in (Phase.DONE, Phase.RECEIVED, Phase.OPEN):",
        (SIM,),
    ),
    Mutation(
        "ticket check: a notice counts whoever wrote it",
        "scheduler/tickets.py",
        "ticket.worker == notice.writer and ",
        "",
        ("tests/unit/scheduler/test_decode_failures.py",),
    ),
    Mutation(
        "ticket check: a notice counts whatever its attempt",
        "scheduler/tickets.py",
        "        ticket = self._tickets.get(notice.ref)\n        last",
        "        ticket = next((t for t in self._tickets.values() if t.ref.ticket == notice.ref.ticket), None)\n        last",
        ("tests/unit/scheduler/test_decode_failures.py", CHAOS),
    ),
    Mutation(
        "commit before match: prompt pages are published when they are asked for",
        "scheduler/prefill/scheduler.py",
        "            chunks.append(Chunk(run, num_new, pages))\n",
        "            chunks.append(Chunk(run, num_new, pages))\n"
        "            self._cache.commit(run.push.lease, run.message.tokens, stop)\n",
        (CHAOS,),
    ),
    Mutation(
        "pages of a step in flight: those of a call that ends meanwhile are free at once",
        "scheduler/prefill/scheduler.py",
        "            self._cache.add_reader(pages)\n",
        "",
        ("tests/unit/scheduler/test_prefill.py",),
    ),
    Mutation(
        "source pages: a push is answered while a write of it is open",
        "scheduler/sender.py",
        "if push.handles or (push.is_open and push.cursor < push.end_page):",
        "if push.is_open and push.cursor < push.end_page:",
        ("tests/unit/scheduler/test_transfer_halves.py",),
    ),
    Mutation(
        "steps in flight: a prompt's next chunk begins where its last output ended",
        "scheduler/prefill/scheduler.py",
        "            start, stop = run.num_launched, run.num_launched + num_new\n",
        "            start, stop = run.num_computed, run.num_computed + num_new\n",
        ("tests/unit/scheduler/test_prefill_overlap.py",),
    ),
    Mutation(
        "steps in flight: what one computes is no hit for a prompt that comes meanwhile",
        "scheduler/prefill/queue.py",
        "                if is_being_computed(call, runs, self._cache.page_size):\n                    continue\n",
        "",
        ("tests/unit/scheduler/test_prefill_overlap.py",),
    ),
    Mutation(
        "who is alive: a worker that falls silent is still offered",
        "gateway/registry.py",
        "        if changed:\n            self._alive.clear()\n",
        "",
        ("tests/unit/gateway/test_policy.py", "tests/unit/gateway/test_dispatch.py"),
    ),
    Mutation(
        "page floor: a page counts as whole when it has begun",
        "kv/cache.py",
        "        first, last = lease.num_shared, num_tokens // self.page_size\n",
        "        first, last = lease.num_shared, -(-num_tokens // self.page_size)\n",
        ("tests/unit/kv/test_kv_lease.py",),
    ),
    Mutation(
        "page floor: the last prompt token may be part of a hit",
        "core/layout.py",
        "page_floor(max(prompt_len - 1, 0), page_size)",
        "page_floor(prompt_len, page_size)",
        ("tests/unit/scheduler/test_decode_flow.py", CHAOS),
    ),
    Mutation(
        "range coverage: arrived pages are counted, wherever they are",
        "scheduler/tickets.py",
        "        return int(self.missing.argmax()) if self.num_missing else len(self.pages)",
        "        return len(self.pages) - self.num_missing",
        ("tests/unit/scheduler/test_decode_flow.py", "tests/unit/scheduler/test_decode_failures.py"),
    ),
    Mutation(
        "range coverage: the last page's notice completes a call",
        "scheduler/tickets.py",
        "        return not self.num_missing",
        "        return not self.missing[-1]",
        ("tests/unit/scheduler/test_decode_coverage.py",),
    ),
    Mutation(
        "digest check removed: a page is taken as it came",
        "scheduler/tickets.py",
        "        return page_checksums(digests, ticket.tokens, ticket.start + notice.first * size, size) == notice.checksums",
        "        return True",
        ("tests/unit/scheduler/test_verified_transfers.py", "tests/chaos/test_damaged_pages.py"),
    ),
    Mutation(
        "digest check: a checksum does not depend on the position",
        "scheduler/checksums.py",
        "seed=start + first",
        "seed=0",
        ("tests/unit/scheduler/test_page_checksums.py",),
    ),
    Mutation(
        "digest check: a damaged range is no longer its writer's",
        "scheduler/decode/prefill_client.py",
        "        board.calls.cancel(call)\n        board.stirred = True",
        "        board.calls.close(call)\n        board.stirred = True",
        ("tests/unit/scheduler/test_verified_transfers.py", "tests/chaos/test_damaged_pages.py"),
    ),
    Mutation(
        "quotas: whoever has too much loses no more than others",
        "kv/eviction.py",
        "in order.quota.above():",
        "in ():",
        ("tests/unit/kv/test_kv_tenant_quota.py",),
    ),
    Mutation(
        "quotas: a tenant divides its cache and has as many quotas",
        "core/identity.py",
        "    return namespace[:OWNER_BYTES]",
        "    return namespace",
        ("tests/unit/kv/test_kv_tenant_quota.py",),
    ),
    Mutation(
        "admin key: any key operates the server",
        "gateway/api/auth.py",
        "        if self._is_admin(given):\n            return\n",
        "        if self._is_admin(given) or self._is_client(given):\n            return\n",
        ("tests/unit/gateway/test_access.py",),
    ),
    Mutation(
        "tenants: a key's salt is not part of its namespace",
        "gateway/api/auth.py",
        "cache_namespace(tenant_salt=self.salt)",
        "cache_namespace()",
        ("tests/unit/lifecycle/test_probing.py",),
    ),
    Mutation(
        "notices: broken text of a stranger ends the worker",
        "core/messages.py",
        "    except (MsgspecError, ValueError, RecursionError):",
        "    except MsgspecError:",
        ("tests/unit/wire/test_codec.py",),
    ),
)
