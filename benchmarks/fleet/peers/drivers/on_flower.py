"""The job on Flower's simulation, which trains in Ray actors: `pip install 'flwr[simulation]'`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from turns import PeerSettings, Turns, make_model, read_job, train


class NoMoreRounds(Exception):
    """The driver's input has ended."""


class TimedFedAvg(FedAvg):  # type: ignore[misc,unused-ignore]
    """FedAvg whose rounds begin on demand and are timed, from sampling to the new model."""

    def __init__(self, job: PeerSettings, turns: Turns) -> None:
        super().__init__(
            fraction_train=job["participants"] / job["devices"],
            fraction_evaluate=0.0,
            min_train_nodes=job["participants"],
            min_available_nodes=job["devices"],
        )
        self._turns, self._job = turns, job

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        """Wait for the round, then sample the devices."""
        if not self._turns.begin():
            raise NoMoreRounds
        messages: Iterable[Message] = super().configure_train(*arguments)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Average the models and tell the time."""
        found, job = list(replies), self._job
        result = super().aggregate_train(server_round, found)
        self._turns.end(job["steps"] * sum(not each.has_error() for each in found))
        return result


def main(path: str) -> None:
    """Run the simulation until no more rounds are asked for."""
    job, turns = read_job(path), Turns()
    client, server = ClientApp(), ServerApp()

    @client.train()  # type: ignore[untyped-decorator,unused-ignore]
    def train_device(message: Message, context: Context) -> Message:
        own = read_job(path)  # in an actor, which has a torch of its own
        model, device = make_model(own), int(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = train(own, model, device, int(message.content["config"]["server-round"]))
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"loss": loss, "num-examples": own["samples"]}),
            }
        )
        return Message(content=content, reply_to=message)

    @server.main()  # type: ignore[untyped-decorator,unused-ignore]
    def serve(grid: Grid, _context: Context) -> None:
        strategy = TimedFedAvg(job, turns)
        arrays = ArrayRecord(make_model(job).state_dict())
        with suppress(NoMoreRounds):
            strategy.start(grid, arrays, num_rounds=10**6, train_config=ConfigRecord())

    run_simulation(
        server,
        client,
        num_supernodes=job["devices"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": job["processes"], "log_to_driver": False},
        },
    )


if __name__ == "__main__":
    main(sys.argv[1])
