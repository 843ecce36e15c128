"""The job on Apple's `pfl` with torch, in processes that reduce with gloo: `pip install pfl`."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from typing import Any

import torch
from turns import PeerSettings, Turns, make_model, read_job, samples_of


def main(path: str, rank: int = 0, port: int = 0) -> None:
    """Run the simulation until no more rounds are asked for, with a process for each other rank."""
    job, turns = read_job(path), Turns() if rank == 0 else None
    if rank == 0:
        port = _free_port()
    others = range(1, job["processes"]) if rank == 0 else ()
    spawn = multiprocessing.get_context("spawn")
    # pfl lets a process take part only if it has this name.
    started = [
        spawn.Process(target=main, args=(path, each, port), name="MainProcess", daemon=True)
        for each in others
    ]
    for process in started:
        process.start()
    if job["processes"] > 1:
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "tessera",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["processes"]),
            "LOCAL_WORLD_SIZE": str(job["processes"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    try:
        _simulate(job, turns)
    finally:
        for process in started:
            process.join(60)


def _simulate(job: PeerSettings, turns: Turns | None) -> None:
    # Importing it joins the processes.
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Perceptron(torch.nn.Module):
        """The model, with the loss that `pfl` asks it for."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model(job)

        def loss(self, inputs: torch.Tensor, targets: torch.Tensor, **_: object) -> torch.Tensor:
            """Return the mean loss."""
            return torch.nn.functional.cross_entropy(self.layers(inputs), targets)

        def metrics(self, *_: object, **__: object) -> dict[str, Any]:
            """Measure nothing: no other simulator here does."""
            return {}

    class Timed(TrainingProcessCallback):  # type: ignore[misc]
        """Begins rounds on demand and tells their time."""

        def on_train_begin(self, *, model: object) -> Any:  # noqa: ARG002
            """Begin the first round."""
            self._begin()
            return Metrics()

        def after_central_iteration(self, *_: object, **__: object) -> Any:
            """End a round and wait for the next; stop if there is none."""
            if turns is not None:
                turns.end(job["participants"] * job["steps"])
            return not self._begin(), Metrics()

        def _begin(self) -> bool:
            more = torch.ones(1)
            if turns is not None and not turns.begin():
                more.zero_()
            if job["processes"] > 1:
                torch.distributed.broadcast(more, 0)
            return bool(more.item())

    np.random.seed(job["seed"])  # noqa: NPY002  pfl draws from it
    module = Perceptron()
    rate, momentum = job["learning_rate"], job["momentum"]
    model = PyTorchModel(
        module,
        local_optimizer_create=lambda weights, lr=rate: torch.optim.SGD(weights, lr, momentum),
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    users = list(range(job["devices"]))
    data = FederatedDataset(
        lambda user: PyTorchTensorDataset(samples_of(job, user), user_id=str(user)),
        get_user_sampler("random", users),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**6,  # once, in the first round, which is not timed
            train_cohort_size=job["participants"],
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=job["steps"] * job["batch"] // job["samples"],
            local_learning_rate=rate,
            local_batch_size=job["batch"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Timed()],
    )


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1])
