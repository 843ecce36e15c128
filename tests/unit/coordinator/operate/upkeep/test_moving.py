"""Packs: the way of a run through one file, what hostile files do, and kills on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregate.rules import RULES
from coordinator.checksums import seal_json
from coordinator.cli import main
from coordinator.errors import CoordinatorError
from coordinator.operate.config import read_config
from coordinator.operate.http.access.tokens import Role, make_tokens, token_path
from coordinator.operate.results.record import read_record
from coordinator.operate.serve.charge import take_charge
from coordinator.operate.serve.start import note_start
from coordinator.operate.upkeep.archive import MAGIC, PackError, read_header
from coordinator.operate.upkeep.moving import pack_run, unpack_run
from coordinator.run.folder import Run
from coordinator.run.steering.audit import MOVING, AuditEntry, is_moving
from coordinator.service.outgoing.fence import FencedError
from edge_sdk.program.command import account
from edge_sdk.program.control import ControlSocket
from edge_sdk.protocol.messages.epoch import Claim, Epoch
from edge_sdk.protocol.messages.wire import encode_message
from tests.unit.coordinator.operate.serve.test_charge import TOPICS, Busy
from tests.unit.coordinator.service.service_world import World, Worlds, rounds_config

ROOT = Path(__file__).resolve().parents[5]
CONFIG = {"rounds": 4, "rule": RULES["ram-fed"]()}


def content(folder: Path) -> dict[str, bytes]:
    """The files of a run that are packed."""
    left_out = ("chunks", "uploads")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name != "lock"
        and path.relative_to(folder).parts[0] not in left_out
    }


def interrupted(worlds: Worlds, folder: str = "run") -> World:
    """A run that was killed once two rounds were closed."""
    world = worlds.make(rounds_config(**CONFIG), folder)
    world.add("one"), world.add("two", level=lambda n: 0.5 if n < 4 else None)
    while len(world.history) < 2:
        world.broker.run()
        world.service.pump()
        for device in world.devices:
            device.pump()
        world.broker.step()
    world.crash()
    return world


def finish(folder: Path) -> str:
    """Let a run go on with the same devices; returns the digest of its model."""
    world = World(folder, rounds_config(**CONFIG))
    world.add("one"), world.add("two", level=lambda n: 0.5 if n < 4 else None)
    world.settle()
    assert world.service.finished
    digest = world.service.model.digest
    world.stop()
    return digest


def test_run_goes_on_elsewhere_with_the_same_bits(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(worlds).folder
    pack, there = tmp_path / "run.pack", tmp_path / "there"
    before = content(folder)
    assert main(["pack", str(folder), "--out", str(pack)]) == 0
    assert pack.stat().st_mode & 0o777 == 0o600
    assert main(["unpack", str(pack), "--to", str(there)]) == 0
    assert content(there) == before == content(folder)
    assert there.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in there.rglob("*"))
    with Run(there) as run:
        assert run.copied
    capsys.readouterr()
    assert main(["pack", str(folder), "--out", str(pack)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["unpack", str(pack), "--to", str(there)]) == 2
    assert "cannot unpack the run in" in capsys.readouterr().err
    assert main(["unpack", str(pack), "--to", str(tmp_path / "no" / "there")]) == 2
    assert "its parent folder does not exist" in capsys.readouterr().err
    assert main(["pack", str(folder), "--out", str(folder / "inside")]) == 2
    with Run(folder):
        assert main(["pack", str(folder), "--out", str(tmp_path / "other")]) == 2
    assert finish(there) == finish(folder)


def start(folder: Path, broker: Busy) -> Epoch:
    with Run(folder) as run:
        epoch = take_charge(
            run, broker.open_link, take_over=False, stop=threading.Event(), listen_s=0.0
        )
        assert epoch is not None
        broker.retain(TOPICS.epoch, encode_message(Claim(run=run.about.run), epoch))
        return epoch


@pytest.mark.parametrize("retained", [True, False])
def test_old_folder_is_fenced(worlds: Worlds, tmp_path: Path, *, retained: bool) -> None:
    """By the claim of the other folder, if the broker has it; after --move, in any case."""
    world = interrupted(worlds)
    folder = world.folder
    with Busy() as broker:
        first = start(folder, broker)
        pack_run(folder, tmp_path / "pack", move=not retained)
        found = unpack_run(tmp_path / "pack", tmp_path / "there")
        assert found["epoch"] == first.counter
        assert start(tmp_path / "there", broker).counter == first.counter + 1
        unpack_run(tmp_path / "pack", tmp_path / "twice")
        with pytest.raises(FencedError, match="was started after"):
            start(tmp_path / "twice", broker)
    with Busy() as other:  # a broker that lost all, but perhaps the claim
        if retained:
            claim = Epoch(first.counter + 1, "b" * 16)
            other.retain(TOPICS.epoch, encode_message(Claim(run="0" * 16), claim))
        words = "was started after" if retained else "was packed to go on"
        with pytest.raises(FencedError, match=words):
            start(folder, other)
    with Busy() as broker, Run(folder) as run:
        taken = take_charge(
            run, broker.open_link, take_over=True, stop=threading.Event(), listen_s=0.0
        )
        assert taken is not None
        assert run.moved is None


def test_damaged_run_is_not_packed(worlds: Worlds, tmp_path: Path) -> None:
    folder = interrupted(worlds).folder
    newest = max((folder / "checkpoints").glob("*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    with pytest.raises(CoordinatorError, match="is damaged"):
        pack_run(folder, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_link_in_a_run_is_not_packed(worlds: Worlds, tmp_path: Path) -> None:
    folder = interrupted(worlds).folder
    (folder / "memory" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(CoordinatorError, match="cannot be packed"):
        pack_run(folder, tmp_path / "pack")


def test_identity_goes_along_if_asked_for(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(worlds).folder
    pack = tmp_path / "pack"
    assert main(["pack", str(folder), "--out", str(pack), "--identity"]) == 2
    authority = tmp_path / "identity"
    authority.mkdir()
    (authority / "ca.key").write_text("key")
    assert main(["pack", str(folder), "--out", str(tmp_path / "plain")]) == 0
    assert (
        f"without the certificate authority in {authority}: keep a copy" in capsys.readouterr().err
    )
    assert main(["pack", str(folder), "--out", str(pack), "--identity"]) == 0
    assert "unencrypted" in capsys.readouterr().out
    unpack_run(pack, tmp_path / "there")
    assert (tmp_path / "there/identity/ca.key").read_text() == "key"


def test_move_without_the_authority_warns(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(worlds).folder
    config = tmp_path / "conf" / "run.toml"
    (tmp_path / "conf" / "identity").mkdir(parents=True)
    (tmp_path / "conf" / "identity" / "ca.key").write_text("key")
    config.write_text(f'[task]\nname = "t"\nsource = "t.py:f"\n[run]\nfolder = "{folder}"\n')
    note_start(folder, read_config(config, environment={}))
    assert main(["pack", str(folder), "--out", str(tmp_path / "pack"), "--move"]) == 0
    said = capsys.readouterr().err
    assert f"without the certificate authority in {config.parent / 'identity'}" in said
    assert "--identity" in said


def test_stop_for_a_move_is_told_from_others() -> None:
    stop = AuditEntry(id="1", time=1.0, by="anna", what="stop", details={"when": "now"})
    assert is_moving(replace(stop, by=f"anna {MOVING}"))
    assert not is_moving(stop)
    assert not is_moving(replace(stop, by=f"anna {MOVING}", what="resume"))
    assert not is_moving(None)


def test_tokens_of_the_page_stay_where_they_are(worlds: Worlds, tmp_path: Path) -> None:
    folder = interrupted(worlds).folder
    make_tokens(folder)
    pack_run(folder, tmp_path / "pack")
    unpack_run(tmp_path / "pack", tmp_path / "there")
    assert not (tmp_path / "there" / "http").exists()
    assert token_path(folder, Role.OPERATE).read_bytes().strip() not in (
        (tmp_path / "pack").read_bytes()
    )


@pytest.mark.parametrize("move", [(), ("--move",)])
def test_served_run_is_stopped_first_if_asked_for(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str], move: tuple[str, ...]
) -> None:
    folder = interrupted(worlds).folder
    asked: list[dict[str, str]] = []
    stop = threading.Event()

    def answer(**given: str) -> None:
        asked.append(given)
        stop.set()

    def serve(ready: threading.Event) -> None:
        with Run(folder):
            control = ControlSocket(folder, {"stop": answer})
            control.start()
            ready.set()
            stop.wait()
            control.close()

    ready = threading.Event()
    server = threading.Thread(target=serve, args=(ready,))
    server.start()
    ready.wait()
    try:
        assert read_record(folder).state == "served"
        command = ["pack", str(folder), "--out", str(tmp_path / "pack")]
        assert main(command) == 2
        assert "is being served: stop it first, or add --stop" in capsys.readouterr().err
        assert not asked
        assert main([*command, "--stop", *move]) == 0
    finally:
        stop.set()
        server.join()
    assert asked == [{"when": "now", "by": account() + (f" {MOVING}" if move else "")}]
    assert read_record(folder).state == "stopped"
    unpack_run(tmp_path / "pack", tmp_path / "there")


# -- hostile files -------------------------------------------------------------------------------


def forged(files: list[Any], data: bytes = b"", **changes: Any) -> bytes:
    """A pack whose checksums are right, whatever it says."""
    facts = {
        "format": 1,
        "task": "tiny",
        "run": "0" * 16,
        "round": 1,
        "epoch": None,
        "identity": False,
        "version": "1",
    }
    header = seal_json({**facts, "files": files, **changes})
    start = MAGIC + len(header).to_bytes(8, "little") + header
    whole, digests, at = hashlib.sha256(start), b"", 0
    for each in files:
        size = each[1] if isinstance(each, list) and isinstance(each[1], int) else 0
        digests += hashlib.sha256(data[at : at + max(size, 0)]).digest()
        at += max(size, 0)
    whole.update(digests)
    return start + data + digests + whole.digest()


PATHS = (
    *("../x", "/etc/x", "a/../../x", "", ".", "a//b", "a/", "./a", ".hidden", "a/.draft"),
    *("a\\..\\b", "c:x", "a\0b", "a\nb", "lock", "join/lock", "x" * 300, "/".join("a" * 20)),
)


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    refuse(tmp_path, forged([[path, 1]], b"x"))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(forged([["a", 1], ["A", 1]], b"xy"), id="twice"),
        pytest.param(forged([["a", 1], ["a/b", 1]], b"xy"), id="file and folder"),
        pytest.param(forged([["a", 2**60]], b"x"), id="larger than the file"),
        pytest.param(forged([["a", -1]], b"x"), id="negative"),
        pytest.param(forged([["a", True]], b"x"), id="no number"),
        pytest.param(forged(["a"], b"x"), id="no pair"),
        pytest.param(forged({}, b"x"), id="no list"),  # type: ignore[arg-type]
        pytest.param(forged([["a", 1]], b"x", format=2), id="later version"),
        pytest.param(forged([["a", 1]], b"x", epoch=[1]), id="no epoch"),
        pytest.param(forged([["a", 1]], b"x", epoch={"a": 1}), id="no epoch either"),
        pytest.param(forged([["run.json", 1]], b"x"), id="no run"),
        pytest.param(forged([["a", 1]], b"x") + b"more", id="more"),
        pytest.param(MAGIC + (2**63).to_bytes(8, "little"), id="huge header"),
        pytest.param(b"PK\3\4" + bytes(100), id="another format"),
        pytest.param(b"", id="empty"),
    ],
)
def test_forged_packs_are_refused(tmp_path: Path, data: bytes) -> None:
    refuse(tmp_path, data)


@pytest.mark.parametrize(
    "path", ["http/operate.token", "HTTP/operate.token", "identity/ca.key", "join/codes.json"]
)
def test_pack_brings_no_secrets_that_its_maker_knows(
    worlds: Worlds, tmp_path: Path, path: str
) -> None:
    folder = interrupted(worlds).folder
    pack_run(folder, tmp_path / "good")
    with (tmp_path / "good").open("rb") as stream:
        header, start = read_header(stream, "good")
        packed = stream.read(header.size)
    (tmp_path / "good").unlink()
    facts = json.loads(start[len(MAGIC) + 8 :])
    known = {key: facts[key] for key in ("task", "run", "round", "epoch", "version")}
    rows = [*(list(each) for each in header.files), [path, 1]]
    refuse(tmp_path, forged(rows, packed + b"x", **known))


def refuse(tmp_path: Path, data: bytes) -> None:
    """Unpack in vain: nothing is left, and nothing was written elsewhere."""
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    (tmp_path / "pack").write_bytes(data)
    with pytest.raises(CoordinatorError):
        unpack_run(tmp_path / "pack", place / "to")
    assert not list(place.iterdir())
    assert {each.name for each in tmp_path.iterdir()} <= {"place", "pack", "run"}


def test_damage_anywhere_is_found(worlds: Worlds, tmp_path: Path) -> None:
    """Bits that flip, bytes that go, come, or change places: every such pack is refused."""
    folder = interrupted(worlds).folder
    pack_run(folder, tmp_path / "good")
    good, chance = (tmp_path / "good").read_bytes(), random.Random(20)
    (tmp_path / "good").unlink()

    def flip(data: bytearray) -> None:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)

    def cut(data: bytearray) -> None:
        del data[chance.randrange(len(data)) :]

    def insert(data: bytearray) -> None:
        data[(at := chance.randrange(len(data))) : at] = bytes(chance.randrange(1, 99))

    def swap(data: bytearray) -> None:
        one = chance.randrange(len(data) - 64)
        data[one : one + 32] = bytes(reversed(data[one : one + 32]))

    ways: list[Callable[[bytearray], None]] = [flip, cut, insert, swap]
    for number in range(32):
        data = bytearray(good)
        ways[number % len(ways)](data)
        if data != good:
            refuse(tmp_path, bytes(data))


# -- kills ---------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from coordinator.operate.upkeep.moving import pack_run, unpack_run
import coordinator.operate.upkeep.inspection, coordinator.task.saved_model
from edge_sdk.program import files

folder, out, to, what = map(Path, sys.argv[1:])

class Counted:
    def __init__(self, at):
        self.left = at
    def __getattr__(self, name):
        found = getattr(os, name)
        if name not in ("open", "write", "replace", "fsync", "mkdir", "rmdir", "unlink", "fchmod"):
            return found
        def step(*arguments, **options):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*arguments, **options)
        return step

at, seen = 0, []
while True:
    child = os.fork()
    if child == 0:
        files.os = Counted(at)
        pack_run(folder, out, move=True) if what.name == "pack" else unpack_run(out, to)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    made = out if what.name == "pack" else to
    seen.append([status == 0, made.exists()])
    if status == 0:
        break
    at += 1 if at < 8 else 5
    if made.exists():  # all was done but the end
        files.remove_folder(made)
print(seen)
"""


@pytest.mark.parametrize("what", ["pack", "unpack"])
def test_kill_leaves_nothing_half(worlds: Worlds, tmp_path: Path, what: str) -> None:
    """Before every step on the disk, at first, and every few: a pack or a folder is whole."""
    folder, out, to = interrupted(worlds).folder, tmp_path / "pack", tmp_path / "to"
    whole = content(folder)
    if what == "unpack":
        pack_run(folder, out)
    command = [sys.executable, "-c", KILLED, str(folder), str(out), str(to), what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.lower())
    assert len(seen) > 8
    assert seen[-1] == [True, True]
    # Until the name is given, there is nothing under it.
    assert [each for _, each in seen] == sorted(each for _, each in seen)
    if what == "pack":
        unpack_run(out, to)
        with Run(folder) as run:
            assert run.moved is not None
    assert content(to) == whole
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"run", "pack", "to"}, "drafts of earlier attempts are removed"


def test_pack_error_is_an_error_of_runs() -> None:
    assert issubclass(PackError, CoordinatorError)
