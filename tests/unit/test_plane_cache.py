"""prism_ray.engines.plane_cache: one load for many, pins, eviction by bytes, fairness, failures, and a seeded storm whose invariants are checked at every change."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections import Counter

import pytest
import torch

from prism_ray.core.errors import ConfigError, FormatError, ResourceError
from prism_ray.engines.plane_cache import PlaneBusy, PlaneCache
from prism_ray.engines.protocol import Plane, PlaneInUse, UnknownPlane

SIZE = 64


def plane(key: str, size: int = SIZE) -> Plane:
    return Plane(digest=f"digest of {key}", scales={"layer": torch.zeros(1, size, dtype=torch.uint8)})


class FakeEngine:
    """Attached digests, with a check at every step that nothing is dropped while somebody uses it."""

    def __init__(self, capacity: int = 10**9):
        self.attached: dict[str, int] = {}
        self.used: Counter[str] = Counter()
        self.capacity = capacity
        self.bad: set[str] = set()
        self.delay = 0.0

    async def attach(self, plane: Plane) -> None:
        await asyncio.sleep(self.delay)
        if plane.digest in self.bad:
            raise FormatError("does not fit", where=plane.digest)
        self.attached[plane.digest] = plane.nbytes
        assert sum(self.attached.values()) <= self.capacity

    async def detach(self, digest: str) -> None:
        if self.used[digest]:
            raise PlaneInUse("in use", where=digest)
        if digest not in self.attached:
            raise UnknownPlane("not attached", where=digest)
        await asyncio.sleep(self.delay)
        assert not self.used[digest]
        del self.attached[digest]


class Loader:
    """Loads with a count for each key; `gate` holds loads back; `failing` keys raise."""

    def __init__(self):
        self.count: Counter[str] = Counter()
        self.failing: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.running = self.most = 0
        self.sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, key: str) -> Plane:
        with self._lock:
            self.count[key] += 1
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            assert self.gate.wait(20)
            if key in self.failing:
                raise self.failing[key]
            return plane(key, self.sizes.get(key, SIZE))
        finally:
            with self._lock:
                self.running -= 1


def run(check, *, planes: int = 3, **options) -> None:
    """Run `check(cache, engine, load)` with room for so many planes; nothing may be left pinned, waiting or loading."""

    async def main() -> None:
        engine, load = FakeEngine(planes * SIZE), Loader()
        cache = PlaneCache(engine, load, planes * SIZE, **options)
        await asyncio.wait_for(check(cache, engine, load), 30)
        while cache._loading:
            await asyncio.sleep(0.001)
        assert cache.stats().pinned == 0 and not cache._waiting
        assert sum(engine.attached.values()) == cache.resident_bytes
        assert set(engine.attached) == set(cache.resident().values())
        await cache.close()
        assert engine.attached == {} and cache.resident_bytes == 0 and not cache._keys_of

    asyncio.run(main())


async def spin(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_fifty_requests_for_a_cold_plane_load_it_once():
    async def check(cache, engine, load):
        async def use() -> str:
            async with cache.pin("a") as digest:
                assert digest in engine.attached
                await asyncio.sleep(0)
                return digest

        assert set(await asyncio.gather(*(use() for _ in range(50)))) == {"digest of a"}
        assert load.count == {"a": 1}
        await use()
        stats = cache.stats()
        assert (stats.loads, stats.hits, stats.failures, stats.resident_bytes) == (1, 1, 0, SIZE)

    run(check)


def test_capacity_one_and_fifty_requests_for_each_of_two():
    """Field case SRV-05: the plane that was just loaded is there for everybody who waited for it."""

    async def check(cache, engine, load):
        async def use(key: str) -> None:
            async with cache.pin(key) as digest:
                assert digest == f"digest of {key}" and list(engine.attached) == [digest]
                await asyncio.sleep(0)

        await asyncio.gather(*(use(key) for key in "ab" * 50))
        assert load.count == {"a": 1, "b": 1}

    run(check, planes=1)


def test_the_least_recently_used_unpinned_plane_goes():
    async def check(cache, engine, load):
        for key in "abc":
            await cache.preload([key])
        async with cache.pin("a"):
            pass
        async with cache.pin("d"):
            assert list(cache.resident()) == ["c", "a", "d"]
        async with cache.pin("c"), cache.pin("e"):
            assert list(cache.resident()) == ["d", "c", "e"]
        assert cache.stats().evictions == 2

    run(check)


def test_eviction_is_by_bytes():
    async def check(cache, engine, load):
        load.sizes = {"big": 2 * SIZE, "whole": 3 * SIZE, "more": 3 * SIZE + 1}
        for key in "abc":
            await cache.preload([key])
        async with cache.pin("big"):
            assert set(cache.resident()) == {"c", "big"}
        async with cache.pin("whole"):
            assert set(cache.resident()) == {"whole"} and cache.resident_bytes == 3 * SIZE
        with pytest.raises(ResourceError, match="193"):
            async with cache.pin("more"):
                pass
        assert set(cache.resident()) == {"whole"}

    run(check)


def test_all_pinned_waits_and_then_is_busy():
    async def check(cache, engine, load):
        async with cache.pin("a"), cache.pin("b"), cache.pin("c"):
            with pytest.raises(PlaneBusy) as refused:
                async with cache.pin("d"):
                    pass
            assert refused.value.retry_after == 7 and refused.value.where == "d"
            assert set(cache.resident()) == set("abc")
            async with cache.pin("a"):  # what was claimed for "d" is open again
                pass
        async with cache.pin("d"):
            pass
        assert cache.stats().busy == 1 and cache.stats().failures == 0

    run(check, wait_s=0.05, fair_s=0.01, retry_after=7)


def test_waiting_ends_when_a_pin_does():
    async def check(cache, engine, load):
        release = asyncio.Event()

        async def hold(key: str) -> None:
            async with cache.pin(key):
                await release.wait()

        holders = [asyncio.create_task(hold(key)) for key in "abc"]
        while cache.stats().pinned < 3:
            await asyncio.sleep(0.001)

        async def use() -> set[str]:
            async with cache.pin("d"):
                return set(cache.resident())

        waiting = asyncio.create_task(use())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        release.set()
        assert "d" in await waiting
        await asyncio.gather(*holders)

    run(check, fair_s=1000)


def test_a_cold_plane_is_served_beside_a_plane_that_is_never_idle():
    """Field case SRV-09: with one slot and overlapping requests for A, B starts after fair_s and the longest request on A; A goes on afterwards."""

    async def check(cache, engine, load):
        served = Counter()
        stop = False

        async def hammer() -> None:
            while not stop:
                async with cache.pin("a"):
                    served["a"] += 1
                    await asyncio.sleep(0.003)

        hammers = [asyncio.create_task(hammer()) for _ in range(4)]
        await asyncio.sleep(0.02)
        async with cache.pin("b") as digest:
            assert list(engine.attached) == [digest]
        before = served["a"]
        while served["a"] < before + 5:
            await asyncio.sleep(0.001)
        stop = True
        await asyncio.gather(*hammers)

    run(check, planes=1, fair_s=0.02, wait_s=20)


def test_cold_loads_hold_up_nobody():
    async def check(cache, engine, load):
        await cache.preload("a")
        load.gate.clear()
        cold = [asyncio.create_task(cache.preload([key])) for key in "bc"]
        while load.running < 2:  # side by side
            await asyncio.sleep(0.001)
        for _ in range(100):
            async with cache.pin("a"):
                await asyncio.sleep(0)
        assert not any(task.done() for task in cold)
        load.gate.set()
        assert await asyncio.gather(*cold) == [{}, {}]
        assert load.most == 2

    run(check)


@pytest.mark.parametrize("error", [OSError("no such file"), FormatError("truncated"), TimeoutError("the store did not answer")], ids=repr)
def test_a_failed_load_reaches_every_waiter_and_leaves_nothing(error):
    async def check(cache, engine, load):
        load.failing["a"] = error

        async def use() -> None:
            async with cache.pin("a"):
                pass

        results = await asyncio.gather(*(use() for _ in range(10)), return_exceptions=True)
        # A thread hands a TimeoutError over as a copy.
        assert all(type(result) is type(error) and result.args == error.args for result in results)
        assert load.count == {"a": 1} and cache.resident() == {} and engine.attached == {}
        del load.failing["a"]
        await use()
        assert load.count == {"a": 2}
        assert cache.stats().failures == 1 and cache.stats().loads == 1

    run(check)


def test_a_plane_that_the_engine_refuses_is_not_visible():
    async def check(cache, engine, load):
        engine.bad.add("digest of a")
        failed = await cache.preload(["a", "b"])
        assert list(failed) == ["a"] and isinstance(failed["a"], FormatError)
        assert cache.resident() == {"b": "digest of b"}
        engine.bad.clear()
        assert await cache.preload(["a"]) == {}

    run(check)


def test_one_that_gives_up_does_not_take_the_load_from_the_others():
    async def check(cache, engine, load):
        load.gate.clear()

        async def use() -> str:
            async with cache.pin("a") as digest:
                return digest

        tasks = [asyncio.create_task(use()) for _ in range(5)]
        await spin()
        for task in tasks[:4]:
            task.cancel()
        await spin()
        load.gate.set()
        assert await tasks[4] == "digest of a"
        assert load.count == {"a": 1}

    run(check)


def test_all_that_wait_may_give_up():
    async def check(cache, engine, load):
        load.gate.clear()
        task = asyncio.create_task(cache.preload(["a"]))
        await spin()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        load.gate.set()
        while cache.stats().loading:
            await asyncio.sleep(0.001)
        assert set(cache.resident()) == {"a"} and cache.stats().pinned == 0

    run(check)


def test_a_load_takes_too_long_for_a_request_and_is_there_for_the_next():
    async def check(cache, engine, load):
        load.gate.clear()
        with pytest.raises(PlaneBusy, match="loading"):
            async with cache.pin("a"):
                pass
        load.gate.set()
        while cache.stats().loading:
            await asyncio.sleep(0.001)
        async with cache.pin("a"):
            pass
        assert load.count == {"a": 1} and cache.stats().hits == 1

    run(check, wait_s=0.02)


def test_unload_drains_and_later_requests_load_again():
    async def check(cache, engine, load):
        entered, leave = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with cache.pin("a") as digest:
                engine.used[digest] += 1
                entered.set()
                await leave.wait()
                assert digest in engine.attached
                engine.used[digest] -= 1

        holder = asyncio.create_task(hold())
        await entered.wait()
        unload = asyncio.create_task(cache.unload("a"))
        await spin()
        late = asyncio.create_task(cache.preload(["a"]))
        await asyncio.sleep(0.01)
        assert not unload.done() and not late.done() and load.count["a"] == 1
        leave.set()
        assert await unload
        await asyncio.gather(holder, late)
        assert load.count["a"] == 2 and cache.stats().unloads == 1
        assert not await cache.unload("never seen")

    run(check)


def test_unload_with_a_limit_gives_the_plane_back():
    async def check(cache, engine, load):
        async with cache.pin("a"):
            with pytest.raises(PlaneBusy, match="1 request"):
                await cache.unload("a", wait_s=0.02)
            async with cache.pin("a"):
                pass
        assert await cache.unload("a", wait_s=0.02)

    run(check)


def test_unload_during_a_load_waits_for_it():
    async def check(cache, engine, load):
        load.gate.clear()
        use = asyncio.create_task(cache.preload(["a"]))
        await spin()
        unload = asyncio.create_task(cache.unload("a"))
        await spin()
        assert not unload.done()
        load.gate.set()
        assert await unload and await use == {}
        assert cache.resident() == {}

    run(check)


def test_a_plane_that_the_engine_still_runs_on_is_left_alone():
    """The engine may hold a plane a moment longer than the pin: the eviction comes again and loses nothing meanwhile."""

    async def check(cache, engine, load):
        for key in "abc":
            await cache.preload([key])
        engine.used["digest of a"] += 1
        use = asyncio.create_task(cache.preload(["d"]))
        await asyncio.sleep(0.02)
        assert not use.done() and "digest of a" in engine.attached and list(cache.resident()) == ["a", "b", "c"]
        engine.used["digest of a"] -= 1
        assert await use == {}
        engine.used["digest of b"] += 1
        unload = asyncio.create_task(cache.unload("b"))
        await asyncio.sleep(0.02)
        engine.used["digest of b"] -= 1
        assert await unload

    run(check)


def test_an_unload_that_is_cancelled_halfway_still_ends():
    async def check(cache, engine, load):
        await cache.preload(["a"])
        engine.delay = 0.02
        unload = asyncio.create_task(cache.unload("a"))
        await spin()
        assert cache.resident() == {} and engine.attached
        unload.cancel()
        await asyncio.gather(unload, return_exceptions=True)
        assert await cache.preload(["a"]) == {}
        assert list(engine.attached) == ["digest of a"] and cache.resident_bytes == SIZE

    run(check)


def test_a_plane_that_somebody_else_detached_is_gone():
    async def check(cache, engine, load):
        await cache.preload(["a"])
        await engine.detach("digest of a")
        assert await cache.unload("a") and cache.resident_bytes == 0
        assert await cache.preload(["a"]) == {} and list(engine.attached) == ["digest of a"]

    run(check)


def test_two_keys_with_the_same_bytes_share_one_plane():
    async def check(cache, engine, load):
        cache._load = lambda key: plane("same")
        async with cache.pin("first"), cache.pin("second"):
            assert cache.resident_bytes == SIZE and len(cache.resident()) == 2
        assert await cache.unload("first")
        assert engine.attached == {"digest of same": SIZE}
        assert await cache.unload("second")
        assert engine.attached == {}

    run(check)


def test_the_error_survives_a_pickle():
    error = pickle.loads(pickle.dumps(PlaneBusy("full", where="a", remedy="wait", retry_after=3.5)))
    assert isinstance(error, PlaneBusy) and error.retry_after == 3.5 and str(error) == "a: full; wait"


@pytest.mark.parametrize("options", [{"wait_s": 0}, {"fair_s": -1}, {"loaders": 0}, {"capacity_bytes": -1}])
def test_options_out_of_range(options):
    with pytest.raises(ConfigError):
        PlaneCache(FakeEngine(), plane, **({"capacity_bytes": 1} | options))


def test_five_hundred_cycles_return_to_the_start():
    async def check(cache, engine, load):
        for index in range(500):
            key = f"k{index % 7}"
            async with cache.pin(key):
                pass
            assert await cache.unload(key)
        assert cache.resident() == {} and cache.resident_bytes == 0 and engine.attached == {}
        assert (cache.stats().loads, cache.stats().unloads) == (500, 500)
        assert not cache._bytes_of and not cache._waiting and not cache._loading

    run(check)


@pytest.mark.parametrize("seed", range(12))
def test_any_interleaving(seed):
    """Requests, unloads, preloads, failures and cancellations in a random order. A request sees its own plane, attached, from begin to end (the fake engine
    asserts that it is never dropped meanwhile), capacity is never exceeded (asserted at every attach), and in the end nothing is held."""
    chance = random.Random(seed)

    async def check(cache, engine, load):
        engine.delay = 0.0005
        load.sizes = {"e": 2 * SIZE, "f": SIZE // 2}
        outcomes: Counter[str] = Counter()

        async def use(key: str) -> None:
            try:
                async with cache.pin(key) as digest:
                    engine.used[digest] += 1
                    try:
                        for _ in range(chance.randrange(4)):
                            assert digest == f"digest of {key}" and digest in engine.attached
                            await asyncio.sleep(chance.random() * 0.003)
                    finally:
                        engine.used[digest] -= 1
                outcomes["served"] += 1
            except PlaneBusy:
                outcomes["busy"] += 1
            except OSError:
                outcomes["failed"] += 1

        async def disturb() -> None:
            for _ in range(60):
                key = chance.choice("abcdef")
                what = chance.random()
                if what < 0.4:
                    load.failing.pop(key, None) if key in load.failing else load.failing.update({key: OSError("flaky")})
                elif what < 0.8:
                    try:
                        await cache.unload(key, wait_s=0.01)
                    except PlaneBusy:
                        outcomes["not unloaded"] += 1
                else:
                    await cache.preload([key])
                await asyncio.sleep(chance.random() * 0.003)
            load.failing.clear()

        tasks = []
        disturbing = asyncio.create_task(disturb())
        for _ in range(250):
            tasks.append(asyncio.create_task(use(chance.choice("aaabbcdef"))))
            if chance.random() < 0.15:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.002)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await disturbing
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        assert outcomes["served"] > 50
        assert await cache.preload("abcdf") == {}

    run(check, planes=3, wait_s=0.5, fair_s=0.005, loaders=3)
