"""What the engines' events change in a decision: exact lengths, tiers, bursts before the events come, and when they are not believed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest

from kvindex.chain import ChainState, token_seed
from kvindex.engine_blocks import EngineBlocks
from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory
from routing.policies import Terms
from routing.router import Decision, Router, RouteRequest
from routing.trust import WINDOW
from workers.profile import WorkerProfile

BLOCK = 32


class Rig:
    """Two workers whose engines publish events."""

    def __init__(self, **profile: object) -> None:
        self.index = MemoryIndex()
        self.router = Router(self.index, RoutingMemory(self.index))
        self.router.token_blocks["m"] = BLOCK
        self.events: dict[str, EngineBlocks] = {}
        for name in ("a", "b"):
            worker = self.router.add_worker(name, ["m"], WorkerProfile(model="m", block_size=BLOCK, kv_capacity_tokens=100_000, **profile))
            self.events[name] = self.router.events[name] = EngineBlocks(self.index, f"kv:{name}", BLOCK)
            worker.trust.events_attached()

    def stored(self, worker: str, tokens: Sequence[int], medium: str = "GPU") -> None:
        """The engine says that it holds these tokens' full blocks."""
        full = len(tokens) // BLOCK * BLOCK
        names = [hash(tuple(tokens[: at + BLOCK])) for at in range(0, full, BLOCK)]
        event = {
            "type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": list(tokens[:full]), "block_size": BLOCK,
            "lora_id": None, "medium": medium,
        }  # fmt: skip
        self.events[worker].apply(msgspec.msgpack.encode([0.0, [event], 0]))

    def request(self, tokens: Sequence[int], session: str | None = None) -> RouteRequest:
        state = ChainState.start(token_seed(), 4 * BLOCK).extend(b"".join(t.to_bytes(4, "little") for t in tokens))
        chain = state.chain()
        return RouteRequest("m", chain.hashes, chain.length, session, tokens=len(tokens), block_tokens=BLOCK)

    def decide(self, tokens: Sequence[int], now: float = 0.0, session: str | None = None) -> Decision:
        decision = self.router.decide(self.request(tokens, session), now)
        decision.reservation.release(now)
        return decision


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def test_cached_tokens_are_whole_blocks_and_never_the_whole_prompt() -> None:
    for length, cached in ((320, 288), (321, 320), (350, 320), (352, 320), (353, 352)):
        rig = Rig()
        rig.stored("b", prompt(2000))
        decision = rig.decide(prompt(length))
        assert (decision.worker.id, decision.prompt_tokens, decision.cached_tokens) == ("b", length, cached)


def test_drafting_from_hidden_states_costs_the_last_block_of_a_hit() -> None:
    rig = Rig(engine="vllm", speculation="eagle3")
    rig.stored("b", prompt(2000))
    assert rig.decide(prompt(350)).cached_tokens == 288
    assert rig.decide(prompt(40)).cached_tokens == 0


def test_what_the_engine_removed_no_longer_counts() -> None:
    rig = Rig()
    tokens = prompt(3200)
    rig.stored("b", tokens)
    names = [hash(tuple(tokens[: at + BLOCK])) for at in range(1600, 3200, BLOCK)]
    rig.events["b"].apply(msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}], 0]))
    assert rig.decide(tokens).cached_tokens == 1600


def test_a_burst_of_siblings_goes_together_before_any_event_has_come() -> None:
    rig = Rig()
    shared = prompt(64_000)
    first = rig.decide(shared + prompt(40, 100_000), 0.0)
    sibling = rig.decide(shared + prompt(40, 200_000), 0.01)
    assert sibling.worker is first.worker
    assert sibling.by_events == 64_000


def test_a_prediction_that_no_event_confirms_is_forgotten() -> None:
    rig = Rig()
    rig.decide(prompt(8000), 0.0)
    for now in range(1, 60):
        rig.router.expire(float(now))
    assert rig.decide(prompt(8000), 60.0).by_events == 0.0


def test_host_memory_counts_with_what_it_costs_to_bring_back() -> None:
    rig = Rig(restore_host_s=1e-3)
    tokens = prompt(6400)
    rig.stored("a", tokens[:3200])
    rig.stored("a", tokens, medium="CPU")
    rig.stored("b", tokens[:3200])
    decision = rig.decide([*tokens, 1])
    terms = {entry[4].id: Terms(*entry) for entry in decision.candidates}
    assert terms["a"].cached == 6400 and terms["b"].cached == 3200
    assert terms["a"].restore == 3.2 and terms["b"].restore == 0.0
    assert decision.worker.id == "b"  # a millisecond a token is slower than computing them
    fast = Rig(restore_host_s=1e-9)
    fast.stored("a", tokens[:3200])
    fast.stored("a", tokens, medium="CPU")
    fast.stored("b", tokens[:3200])
    assert fast.decide([*tokens, 1]).worker.id == "a"


def test_a_worker_that_holds_what_was_routed_elsewhere_gets_it() -> None:
    """Events win over routing memory: somebody else may have sent the prompt to the engine."""
    rig = Rig()
    tokens = prompt(9000)
    assert rig.decide(tokens, 0.0).worker.id == "a"
    rig.events["a"].reset()  # its engine has dropped it
    rig.stored("b", tokens)
    assert rig.decide(tokens, 1.0).worker.id == "b"


def learn(rig: Rig, decision: Decision, cached: int) -> None:
    rig.router.learn(decision, prompt_tokens=decision.request.tokens, cached_tokens=cached, ttft_s=None)


def test_events_that_keep_being_wrong_give_way_to_routing_memory_and_then_to_load_alone() -> None:
    rig = Rig()
    rig.router.set_up(rig.router.workers["b"], False)
    worker = rig.router.workers["a"]
    for n in range(WINDOW):
        tokens = prompt(3200, 100_000 * n)
        rig.decide(tokens, 10.0 * n)  # routing memory knows of it, and the engine really has it
        rig.events["a"].reset()  # but its events are lost
        decision = rig.decide(tokens, 10.0 * n + 1)
        learn(rig, decision, cached=3168)
    assert worker.trust.level == "memory"
    assert rig.decide(prompt(3200, 0), 300.0).cached_tokens == 3168
    for n in range(WINDOW):
        tokens = prompt(3200, 100_000 * n)
        learn(rig, rig.decide(tokens, 400.0 + 20 * n), cached=1600)  # routing memory is wrong as well
    assert worker.trust.level == "load"
    assert rig.decide(prompt(3200, 0), 1000.0).cached_tokens == 0.0


def test_an_engine_that_never_reports_cached_tokens_is_not_judged() -> None:
    rig = Rig()
    for n in range(3 * WINDOW):
        decision = rig.decide(prompt(3200), float(n))
        rig.router.learn(decision, prompt_tokens=3200, cached_tokens=None, ttft_s=None)
    assert rig.router.workers["a"].trust.level == "exact"


def test_a_session_without_a_key_is_found_again_although_the_engine_holds_more_than_its_prompts() -> None:
    """Engines report what they generated as well: a longer match than the session's last prompt."""
    rig = Rig()
    tokens = prompt(3200)
    homes = []
    for turn in range(6):
        decision = rig.decide(tokens, float(turn))
        homes.append(decision.worker.id)
        tokens = tokens + prompt(100, 100_000 + 1000 * turn)  # generated
        rig.stored(decision.worker.id, tokens)
        tokens = tokens + prompt(200, 200_000 + 1000 * turn)  # the next turn's own
    assert len(set(homes)) == 1
    assert len(rig.router.sessions) == 1


def test_what_was_sent_and_refused_does_not_count_as_held() -> None:
    rig = Rig()
    decision = rig.decide(prompt(3200), 0.0)
    rig.router.failed(decision)
    assert rig.decide(prompt(3200), 0.1).by_events == 0.0


def test_what_siblings_are_still_computing_is_no_test_of_the_index() -> None:
    """Whether the engine shares a prefix that is being computed is its own affair: a burst must not cost the worker its trust."""
    rig = Rig()
    rig.router.set_up(rig.router.workers["b"], False)
    shared = prompt(3200)
    burst = [rig.router.decide(rig.request(shared + prompt(100, 10_000 + 200 * n)), 0.0) for n in range(2 * WINDOW)]
    for decision in burst:
        decision.reservation.release(1.0)
        learn(rig, decision, cached=0)
    assert rig.router.workers["a"].trust.level == "exact"


def test_an_engine_whose_answers_cannot_be_checked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level(logging.WARNING):
        for n in range(3 * WINDOW):
            rig.router.learn(rig.decide(prompt(3200), float(n)), prompt_tokens=3200, cached_tokens=None, ttft_s=None)
    assert caplog.text.count("does not report cached tokens") == 1
