"""Brokers of every kind: shared by the tests of a module, or of one test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.transport.harness import Bench, Server, serve


@pytest.fixture(scope="module", params=["memory", "mosquitto", "amqtt"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from serve(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def bench(server: Server) -> Iterator[Bench]:
    bench = Bench(server)
    yield bench
    bench.close()


@pytest.fixture(params=["memory", "mosquitto"])
def own_bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """On a broker that no other test uses, and that may be restarted."""
    for server in serve(request.param, tmp_path_factory.mktemp(request.param)):
        bench = Bench(server)
        yield bench
        bench.close()
