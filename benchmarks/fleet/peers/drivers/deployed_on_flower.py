"""The job as an app that Flower deploys: `flwr run` sends it to a SuperLink and its SuperNodes.

Flower copies this file and `turns.py`. Its settings name the job, the number of rounds, and two
files: one gets a line when a round ends, the other a line for each process that trained.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from turns import make_model, read_job, train

client = ClientApp()
server = ServerApp()


def _add_line(path: str, values: dict[str, Any]) -> None:
    """Append a line with one write, so that lines of several processes do not mix."""
    with Path(path).open("ab", buffering=0) as file:
        file.write(json.dumps(values).encode() + b"\n")


@client.train()  # type: ignore[untyped-decorator,unused-ignore]
def train_device(message: Message, context: Context) -> Message:
    """Take a device's steps, as the bare loop does."""
    settings = context.run_config
    job, device = read_job(settings["job"]), int(context.node_config["device"])
    number = int(message.content["config"]["server-round"])
    model = make_model(job)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(job, model, device, number)
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"loss": loss, "num-examples": job["samples"]}),
        }
    )
    answer = Message(content=content, reply_to=message)
    # A process trains once and ends: nobody could read its time from outside.
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = {"round": number, "cpu_s": time.process_time(), "peak_bytes": peak_kb * 1024}
    _add_line(settings["trained"], line | {"pid": os.getpid()})
    return answer


@server.main()  # type: ignore[untyped-decorator,unused-ignore]
def serve(grid: Grid, context: Context) -> None:
    """Average all devices' models in every round."""
    settings = context.run_config
    job = read_job(settings["job"])

    class Timed(FedAvg):  # type: ignore[misc,unused-ignore]
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            found = list(replies)
            result = super().aggregate_train(server_round, found)
            errors = sum(each.has_error() for each in found)
            line = {"round": server_round, "time": time.time(), "errors": errors}
            _add_line(settings["rounds_file"], line | {"answers": len(found)})
            return result

    everybody = job["devices"]
    strategy = Timed(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=everybody,
        min_available_nodes=everybody,
    )
    arrays = ArrayRecord(make_model(job).state_dict())
    strategy.start(grid, arrays, num_rounds=settings["rounds"], train_config=ConfigRecord())
