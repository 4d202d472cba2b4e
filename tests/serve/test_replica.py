"""What runs in an actor of a cluster, without one: it answers as the service does, and says when to replace it."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rcd.decode.config import DecodeConfig
from rcd.decode.engine import Engine
from rcd.errors import RCDError
from rcd.serve.loading import Models
from rcd.serve.pieces import Done, Refused
from rcd.serve.replica import MOST_FAILURES, Replica
from rcd.serve.schema import Ask
from rcd.serve.settings import ServeSettings
from tests.serve.conftest import QUESTION, Api

ASK = Ask(False, None, [QUESTION])


@pytest.fixture
def replica() -> Iterator[Replica]:
    before = sys.getswitchinterval()
    yield Replica(Models({"words-rcd": "bundled:words-rcd"}, lambda pipeline: DecodeConfig()), ServeSettings())
    sys.setswitchinterval(before)


async def answered(replica: Replica, ask: Ask = ASK) -> Any:
    return [piece async for found in replica.pieces(ask) for piece in found][-1]


def test_a_replica_gives_plain_values_that_travel(replica: Replica, make_api: Any) -> None:
    api: Api = make_api("words-rcd")

    async def all_of_them() -> Any:
        pieces = [found async for found in replica.pieces(Ask(False, None, [QUESTION], stream=True, drafts=True))]
        return pieces, await replica.cards(), await replica.example(None, 3), await replica.load()

    pieces, cards, example, load = found = asyncio.run(all_of_them())
    assert pickle.loads(pickle.dumps(found)) == found
    done = [piece for told in pieces for piece in told if isinstance(piece, Done)]
    assert [one.text for one in done] == [api.complete()["choices"][0]["text"]]
    assert cards == api.get("/v1/models").json()["data"] and example == api.get("/rcd/examples?seed=3").json()
    assert load["words-rcd"].replicas == 1 and load["words-rcd"].passes > 0


def test_what_a_replica_refuses_is_a_value_too(replica: Replica) -> None:
    found = asyncio.run(replica.example("nobody", 0))
    assert isinstance(found, Refused) and found.status == 404
    assert asyncio.run(answered(replica, Ask(False, "nobody", [QUESTION]))) == found


def test_a_replica_on_which_every_request_fails_asks_to_be_replaced(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: Engine) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    async def failures(count: int) -> None:
        for _ in range(count):
            assert (await answered(replica)).code == "decoding_failed"

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "turn", broken)
        asyncio.run(failures(MOST_FAILURES - 1))
        asyncio.run(replica.check_health())
    assert isinstance(asyncio.run(answered(replica)), Done)  # one that is answered starts the count anew
    monkeypatch.setattr(Engine, "turn", broken)
    asyncio.run(failures(MOST_FAILURES))
    with pytest.raises(RuntimeError, match="decoding failed on 3 requests in a row"):
        asyncio.run(replica.check_health())


def test_a_replica_that_cannot_load_its_model_says_why() -> None:
    with pytest.raises(RCDError, match="there is no folder or file"):
        Replica(Models({"x": "/nowhere"}, lambda pipeline: DecodeConfig()), ServeSettings())
