"""The configuration: what `init` writes works, what is wrong is named, with the nearest key."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregate.robust import SERVED, Robust
from coordinator.aggregate.rules import make_rule
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.masks import make_masks
from coordinator.masks.policies.gre_raa import GreRaaMasks
from coordinator.masks.policies.nested import NestedMasks
from coordinator.operate.config import (
    ROUNDS,
    UPDATES,
    RunTable,
    ServeConfig,
    read_config,
    render_default,
)
from coordinator.operate.configuration import pages
from coordinator.operate.serve.serving import screening
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from edge_sdk.device import config as device
from edge_sdk.device.config import DeviceConfig
from edge_sdk.program.settings import Example
from edge_sdk.program.settings.reference import meanings, render_example
from edge_sdk.program.settings.types import keys
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.description import InputDescription
from tests.unit.coordinator.service.service_world import PLAN

TASK = '[task]\nname = "t"\nsource = "task.py:make"\n'
RUN = '[run]\nfolder = "here"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_file_is_up_to_date(path: Path) -> None:
    hint = "run python -m coordinator.operate.configuration"
    assert path.read_text(encoding="utf-8") == pages()[path], hint


def test_page_has_every_key_of_both_programs_with_its_variable() -> None:
    (page,) = (text for path, text in pages().items() if path.suffix == ".md")
    for key in (*keys(ServeConfig), *keys(DeviceConfig)):
        (row,) = {line for line in page.splitlines() if line.endswith(f"| `{key.variable}` |")}
        assert row.startswith(f"| `{key.path[-1]}` | "), row
        meaning = row.split(" | ")[3]
        assert len(meaning) > 8, row
        assert not meaning.startswith(("What", "How", "Who", "Whether")), row


def test_what_init_writes_works(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, render_default()))
    machine = config.machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    assert isinstance(machine.rule, RamFed)
    assert (machine.rounds, machine.min_devices, config.broker.embedded) == (30, 2, True)
    assert config.run.folder == tmp_path / "run"


@pytest.mark.parametrize(
    ("render", "read"),
    [
        (render_default, read_config),
        (lambda: device.render_default({"task": "digits"}), device.load_config),
    ],
    ids=["coordinator", "device"],
)
def test_commented_defaults_of_a_file_to_start_from_are_the_defaults(
    tmp_path: Path, render: Callable[[], str], read: Callable[..., Any]
) -> None:
    text = render()
    shown = re.compile(r"^# (?=\w+ = )(?!.*# an example)", flags=re.MULTILINE)
    uncommented, count = shown.subn("", text)
    assert count > 20
    plain = read(write(tmp_path, text), environment={})
    other = read(write(tmp_path, uncommented), environment={})
    if isinstance(plain, device.DeviceConfig):  # a path that is not given is not the file's
        plain = replace(plain, state_dir=other.state_dir)
    assert other == plain


MOMENTS = ("mean", "deviation")


def test_description_in_the_file_replaces_the_task_s_own(tmp_path: Path) -> None:
    own = DataSpec((ArraySpec("float32", (2,)),) * 2, ArraySpec("int64", (), 1)).described(
        inputs=[InputDescription(range=(0, 1)), InputDescription(range=(0, 2))]
    )
    plain = read_config(write(tmp_path, TASK + RUN))
    assert plain.described(own) == own
    named = read_config(
        write(tmp_path, f'{TASK}classes = ["a", "b"]\n{RUN}[inputs]\nfeatures = ["u", "v"]\n')
    )
    found = named.described(own)
    assert found.classes == ("a", "b")
    assert found.descriptions == (
        InputDescription(features=("u", "v")),
        InputDescription(range=(0, 2)),
    )
    three = replace(own, targets=ArraySpec("int64", (), 2))
    with pytest.raises(ConfigError, match=r"do not fit the model: 2 classes .* the task has 3"):
        named.described(three)
    with pytest.raises(ConfigError, match=r"inputs\.range = \[1.0\]: give the lowest and highest"):
        read_config(write(tmp_path, f"{TASK}{RUN}[inputs]\nrange = [1.0]\n"))


def test_examples_of_a_file_to_start_from_can_be_read(tmp_path: Path) -> None:
    given = {"task.name": "t", "task.source": "t.py:f", "run.folder": "run"}
    for key in keys(ServeConfig):
        example = key.kind.mark(Example)
        if example is None or key.dotted in given or key.path[0] == "broker":
            continue
        both = {"round.target_accuracy", "round.patience"}
        more: dict[str, Any] = {"task.evaluation": "t.npz"} if key.dotted in both else {}
        more |= {"rule.name": "fed-raa"} if key.dotted == "run.updates" else {}
        more |= {"mask.name": "random"} if key.dotted == "mask.options" else {}
        more |= {"server_optimizer.name": "yogi"} if key.path[0] == "server_optimizer" else {}
        more |= {"run.robust": "root"} if key.dotted == "robust.data" else {}
        more |= {"run.robust": "clip-median"} if key.dotted == "robust.agreement" else {}
        more |= {"inputs.mean": [0.0], "inputs.deviation": [1.0]} if key.path[-1] in MOMENTS else {}
        if key.dotted in ("http.certificate", "http.key"):
            more |= {"http.certificate": "page.pem", "http.key": "page.key"}
        sound = {"sample_rate": 16_000, "mels": 40, "frame": 400, "hop": 160}
        if key.path[-1] in sound:
            more |= {f"inputs.{name}": value for name, value in sound.items()}
        text = render_example(ServeConfig, {**given, **more, key.dotted: example.value}, "")
        read_config(write(tmp_path, text), environment={})


def test_agreement_without_a_defence_is_refused(tmp_path: Path) -> None:
    for robust in ("", 'robust = "none"\n'):
        text = f"{TASK}{RUN}{robust}[robust]\nagreement = -0.15\n"
        with pytest.raises(ConfigError, match=r"agreement = -0.15: does nothing with robust"):
            read_config(write(tmp_path, text), environment={})


def test_length_that_the_page_names_is_the_length(tmp_path: Path) -> None:
    assert meanings(RunTable)["rounds"].endswith(f"without it, {ROUNDS}.")
    assert meanings(RunTable)["updates"].endswith(f"without it, {UPDATES}.")
    assert meanings(RunTable)["robust"].endswith(f"Without it, `{SERVED}`.")


def test_least_that_must_be_said(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, TASK + RUN))
    machine = config.machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    assert machine.rounds == 50
    assert config.run.down == Encoding()
    assert config.broker.embedded
    assert config.can_join


def test_asynchronous_rule_counts_updates(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}updates = 77\nup = "int8"\n[rule]\nname = "fed-raa"\n'
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert isinstance(machine, FragmentsConfig)
    assert machine.updates == 77
    assert machine.up == Encoding(kind="int8")


def test_asynchronous_run_may_stop_early_and_cut_its_model_in_other_ways(tmp_path: Path) -> None:
    text = (
        f"{TASK}evaluation = 't.npz'\n{RUN}[rule]\nname = 'fedbuff'\n"
        "[rule.options]\nsize = 5\nfragments = true\nstaleness = 'hinge'\nserver_rate = 0.5\n"
        "[mask.options]\nfragments = 'rotating'\nassign = 'least-trained'\ncount = 'completed'\n"
        "[round]\ntarget_accuracy = 0.9\npatience = 4\n"
    )
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert isinstance(machine, FragmentsConfig)
    assert (machine.target_accuracy, machine.patience) == (0.9, 4)
    assert machine.rule == FedBuff(size=5, fragments=True, staleness="hinge", server_rate=0.5)
    assert machine.masks == GreRaaMasks(
        fragments="rotating", assign="least-trained", count="completed"
    )


def test_fragments_are_dealt_out_in_rounds_too(tmp_path: Path) -> None:
    text = f"{TASK}{RUN}[rule]\nname = 'ra-fed'\n[mask]\nname = 'gre-raa'\n"
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    assert (machine.masks, machine.local_rule.widths) == (GreRaaMasks(), "own")


def test_options_reach_rule_and_masks(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}[rule]\nname = "ram-fed"\n[rule.options]\ndamping = 0.5\n'
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert isinstance(machine.rule, RamFed)
    assert machine.rule.damping == 0.5


def test_several_widths_reach_the_local_rule_and_choose_masks_with_an_order(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}widths = "sandwich"\ndistillation = 0.5\nlevels = [1, 0.5]\n'
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert (machine.local_rule.widths, machine.local_rule.distillation) == ("sandwich", 0.5)
    assert machine.levels == (1.0, 0.5)
    assert machine.masks == NestedMasks()


def test_password_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_BROKER_PASSWORD", "secret")
    text = f'{TASK}{RUN}[broker]\nhost = "b.example.org"\ntls = true\nusername = "u"\n'
    config = read_config(write(tmp_path, text))
    settings = config.broker
    assert (settings.password, settings.port) == ("secret", 8883)
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[task\n", "it is not TOML"),
        (TASK, r"run is missing; set it in the file, or as TESSERA_RUN"),
        (TASK + "[run]\n", r"run\.folder is missing; set it in the file, or as TESSERA_RUN_FOLDER"),
        (RUN, "task is missing"),
        (f"{TASK}{RUN}[rounds]\n", "rounds is not a known key; did you mean 'round'"),
        (f"{TASK}{RUN}learningrate = 1\n", r"run\.learningrate .* did you mean 'learning_rate'"),
        (f"{TASK}{RUN}xyzzy = 1\n", "known are folder, rounds"),
        (f"{TASK}{RUN}quorum = 1\n", r"did you mean 'quorum' in \[round\]"),
        (f"{TASK}{RUN}[round]\nmin_device = 1\n", "did you mean 'min_devices'"),
        (f"{TASK}{RUN}steps = 1.5\n", r"run\.steps = 1.5: must be a whole number"),
        (f"{TASK}{RUN}steps = true\n", "steps = True: must be a whole number"),
        (f"{TASK}{RUN}steps = 0\n", r"run\.steps = 0: must be at least 1"),
        (f"{TASK}{RUN}learning_rate = '1'\n", "learning_rate = '1': must be a number"),
        (f"{TASK}{RUN}learning_rate = -1\n", "learning_rate = -1: must be above 0"),
        (f"{TASK}{RUN}momentum = 1\n", "momentum = 1: must be at least 0 and below 1"),
        (f"{TASK}{RUN}clip_norm = -1\n", "clip_norm = -1: must be at least 0"),
        (f"{TASK}{RUN}rms_limit = 1\n", "rms_limit = 1: must be above 1"),
        (
            f"{TASK}{RUN}widths = 'both'\n",
            r"run\.widths = 'both': must be one of own",
        ),
        (
            f"{TASK}{RUN}widths = 'own'\ndistillation = 0.5\n",
            r"run\.distillation = 0.5: needs the wide outputs",
        ),
        (f"{TASK}{RUN}levels = [0.5]\n", r"run\.levels = \[0.5\]: must be up to 64 shares"),
        (f"{TASK}{RUN}levels = [1, 2]\n", r"run\.levels = \[1, 2\]: must be a list, each item"),
        (f"{TASK}{RUN}keep_last = 0\n", "keep_last = 0: must be at least 1"),
        (f"{TASK}{RUN}up = 'fp31'\n", r"run\.up = 'fp31': unknown encoding 'fp31'; use fp32"),
        (f"{TASK}{RUN}down = 8\n", r"run\.down = 8: must be fp32, fp16"),
        (
            f"{TASK}{RUN}memory_type = 'fp8'\n",
            "memory_type = 'fp8': must be one of fp32, fp16",
        ),
        (f"{TASK}{RUN}[rule]\nname = 'fedavgg'\n", "no rule 'fedavgg'; did you mean 'fedavg'"),
        (f"{TASK}{RUN}[rule]\noptions = 3\n", r"rule\.options = 3: must be a table"),
        (f"{TASK}{RUN}[rule.options]\ndampin = 1\n", "did you mean 'damping'"),
        (
            f"{TASK}{RUN}[rule.options]\ndamping = 'x'\n",
            "rule 'ram-fed': damping = 'x': must be adaptive",
        ),
        (f"{TASK}{RUN}[rule.options]\nweighting = 'x'\n", "weighting = 'x': must be one of unif"),
        (f"{TASK}{RUN}updates = 3\n", "does not fit this rule: set run.rounds instead"),
        (f"{TASK}{RUN}rounds = 3\n[rule]\nname = 'fed-raa'\n", "set run.updates instead"),
        (f"{TASK}{RUN}[round]\npatience = 3\n", "evaluation"),
        (f"{TASK}{RUN}[round]\nquorum = 2\n", r"round\.quorum = 2: must be above 0 and at most 1"),
        (f"{TASK}{RUN}[round]\nbid_s = 0\n", r"round\.bid_s = 0: must be above 0"),
        (f"{TASK}{RUN}[round]\nmax_devices = 2\nmin_devices = 3\n", "max_devices = 2: must be"),
        (f"{TASK}{RUN}[broker]\nembedded = true\ntls = true\n", r"broker\.embedded = true starts"),
        (f"{TASK}{RUN}[broker]\nhost = 'far.example'\n", "is another machine and tls is off"),
        ('[task]\nname = "No/Good"\nsource = "x:y"\n' + RUN, r"task\.name: 'No/Good' cannot name"),
    ],
)
def test_what_is_wrong_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as error:
        read_config(path, environment={})
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[round]\nover_selection = 2\n", "over_selection needs participants"),
        ("[rule]\nname = 'fedavg'\n[mask]\nname = 'gre-raa'\n", "takes whole models only"),
        ("[rule]\nname = 'fedbuff'\n[mask]\nname = 'gre-raa'\n", "set fragments = true"),
        (
            "widths = 'sandwich'\n[mask]\nname = 'rolling'\n",
            "sandwich needs levels that lie",
        ),
        ("widths = 'sandwich'\n[rule]\nname = 'fed-raa'\n", "leave widths at own"),
        ("[mask]\nname = 'rnadom'\n", "there is no mask policy 'rnadom'; did you mean 'random'"),
    ],
)
def test_what_does_not_go_together_is_said_with_the_plan(
    tmp_path: Path, text: str, said: str
) -> None:
    config = read_config(write(tmp_path, TASK + RUN + text), environment={})
    with pytest.raises(ConfigError, match=said):
        config.machine(PLAN)


def test_variables_win_over_the_file_and_unknown_ones_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path, f"{TASK}{RUN}steps = 3\n")
    set_ = {"TESSERA_RUN_STEPS": "5", "TESSERA_RULE_OPTIONS": '{"damping": 0.5}'}
    config = read_config(path, environment={**set_, "TESSERA_WEIGH": "of the device"})
    assert config.run.steps == 5
    assert config.make_rule() == RamFed(damping=0.5)
    with pytest.raises(
        ConfigError, match=r"TESSERA_RUN_STEP is .* did you mean 'TESSERA_RUN_STEPS'"
    ):
        read_config(path, environment={"TESSERA_RUN_STEP": "5"})
    with pytest.raises(ConfigError, match=r"^TESSERA_RULE_OPTIONS = 'x': must be a table"):
        read_config(path, environment={"TESSERA_RULE_OPTIONS": "x"})


def test_both_certificates_of_the_coordinator_are_read(tmp_path: Path) -> None:
    files = {name: f"{name}.pem" for name in ("certificate", "key", "bulk_certificate", "bulk_key")}
    lines = "".join(f'{name} = "{file}"\n' for name, file in files.items())
    settings = read_config(write(tmp_path, f"{TASK}{RUN}[broker]\ntls = true\n{lines}"))
    for name, file in files.items():
        assert getattr(settings.broker, name) == tmp_path / file


def test_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tessera-coordinator init"):
        read_config(tmp_path / "none.toml")


BROKER = "[broker]\nembedded = true\n"


@pytest.mark.parametrize(
    ("given", "clip_norm", "said"),
    [
        ("", 20.0, "a movement is at most 200 long (clip_norm 20), and is judged beside those of"),
        ("clip_norm = 1.5\n", 1.5, "a movement is at most 15 long (clip_norm 1.5)"),
        ("clip_norm = 0\n", None, "gradients are not clipped, so nothing bounds a movement before"),
        ("recipe = 'oap'\n", None, "gradients are not clipped"),
        ("recipe = 'oap'\nclip_norm = 2\n", 2.0, "a movement is at most 20 long"),
    ],
)
def test_gradients_are_clipped_unless_a_run_or_a_recipe_says_otherwise(
    tmp_path: Path, given: str, clip_norm: float | None, said: str
) -> None:
    rates = "learning_rate = 1.0\nsteps = 10\n"
    machine = read_config(write(tmp_path, f"{TASK}{RUN}{rates}{given}")).machine(PLAN)
    assert machine.local_rule.clip_norm == clip_norm
    assert screening(machine).startswith(said)


def read(folder: Path, text: str, variables: dict[str, str] | None = None) -> ServeConfig:
    return read_config(write(folder, f"{BROKER}{text}"), environment=variables or {})


def test_recipe_sets_rule_masks_and_local_rule_together(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}recipe = "fjord"\nmomentum = 0.5\n[mask.options]\nseed = 3\n'
    config = read(tmp_path, text)
    machine = config.machine(PLAN)
    assert machine.rule == make_rule("ra-fed", weighting="samples")
    assert machine.masks == make_masks("nested", tied=True, seed=3)
    rule = machine.local_rule
    assert (rule.widths, rule.rescale, rule.momentum) == ("ordered-dropout", 0.0, 0.5)
    again = f'{text}tied = true\n[rule]\nname = "ra-fed"\n[rule.options]\nweighting = "samples"\n'
    assert read(tmp_path, again) == config


def test_recipes_of_papers_set_what_they_print(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}recipe = "ram-fed-paper"\n'
    machine = read(tmp_path, text).machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    assert machine.rule == make_rule("ram-fed", damping=1.0, population="all", warmup_rounds=1)
    assert machine.masks == make_masks("random")
    assert machine.local_rule.rescale == 0
    assert machine.max_staleness == 1000
    with pytest.raises(ConfigError, match=r"sets run\.max_staleness"):
        read(tmp_path, f"{text}max_staleness = 50\n")
    machine = read(tmp_path, f'{TASK}{RUN}recipe = "ccfl-paper"\n').machine(PLAN)
    assert machine.rule == make_rule("ccfl-2", horizon="none", absent="zero")


def test_ccfl_as_printed_and_study_masks_are_options_of_a_file(tmp_path: Path) -> None:
    rule = '[rule]\nname = "ccfl-1"\noptions = {horizon = "none", absent = "zero"}\n'
    mask = '[mask]\nname = "scheduled"\noptions = {coverage = 2, regions = 3, staleness = "none"}\n'
    machine = read(tmp_path, f"{TASK}{RUN}{rule}{mask}").machine(PLAN)
    assert machine.rule == make_rule("ccfl-1", horizon="none", absent="zero")
    assert machine.masks == make_masks("scheduled", coverage=2, regions=3, staleness="none")
    mask = '[mask]\nname = "places"\noptions = {levels = [1, 0.75], masks = "greedy"}\n'
    machine = read(tmp_path, f"{TASK}{RUN}{rule}{mask}").machine(PLAN)
    assert machine.masks == make_masks("places", levels=(1.0, 0.75), masks="greedy")


@pytest.mark.parametrize(
    ("more", "variables", "says"),
    [
        ('widths = "own"\n', {}, "sets run.widths = 'ordered-dropout', but run.widths gives 'own'"),
        ("rescale = 0.5\n", {}, r"sets run\.rescale = 0\.0, but run\.rescale gives 0\.5"),
        ('[rule]\nname = "ram-fed"\n', {}, "rule.name = 'ra-fed', but rule.name gives 'ram-fed'"),
        (
            '[rule.options]\nweighting = "uniform"\n',
            {},
            "rule.options.weighting = 'samples', but rule.options.weighting gives 'uniform'",
        ),
        ("", {"TESSERA_RUN_RESCALE": "1"}, "run.rescale = 0.0, but TESSERA_RUN_RESCALE gives '1'"),
        ("", {"TESSERA_MASK_NAME": "core"}, "mask.name = 'nested', but TESSERA_MASK_NAME gives"),
    ],
)
def test_recipe_and_another_value_for_its_setting_are_refused(
    tmp_path: Path, more: str, variables: dict[str, str], says: str
) -> None:
    text = f'{TASK}{RUN}recipe = "fjord"\n{more}'
    with pytest.raises(ConfigError, match=r"run\.toml: recipe fjord sets") as caught:
        read(tmp_path, text, variables)
    assert re.search(says, str(caught.value))


def test_recipe_with_the_same_values_in_variables_is_read(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}recipe = "fjord"\n'
    config = read(tmp_path, text, {"TESSERA_RUN_RESCALE": "0", "TESSERA_MASK_NAME": "nested"})
    assert config == read(tmp_path, text)


def test_numbers_that_a_recipe_only_starts_from_may_be_given(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}recipe = "fedprox"\n'
    for given, value in (("", 0.01), ("proximal = 1.0\n", 1.0)):
        machine = read(tmp_path, f"{text}{given}").machine(PLAN)
        assert machine.rule == make_rule("fedavg", weighting="samples")
        assert machine.local_rule.proximal == value
    sam = read(tmp_path, f'{TASK}{RUN}recipe = "fedsam"\n').machine(PLAN).local_rule
    assert (sam.sam_radius, sam.proximal) == (0.1, 0.0)


def test_recipe_that_does_not_exist_or_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no recipe 'fjor'; did you mean 'fjord'"):
        read(tmp_path, f'{TASK}{RUN}recipe = "fjor"\n')
    with pytest.raises(ConfigError, match=r"run\.recipe = 3: must be"):
        read(tmp_path, f"{TASK}{RUN}recipe = 3\n")
    with pytest.raises(ConfigError, match="decouple_norms"):
        read(tmp_path, f'{TASK}{RUN}recipe = "nefl"\n').machine(PLAN)


def test_robust_choice_and_its_numbers(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}robust = "trimmed-mean"\n[robust]\nhostile = 0.3\nfactor = 2.0\n'
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    assert machine.robust == Robust(name="trimmed-mean", hostile=0.3, factor=2.0)
    bare = read_config(write(tmp_path, f"{TASK}{RUN}")).make_robust()
    assert bare.name == SERVED
    recipe = read_config(write(tmp_path, f'{TASK}{RUN}recipe = "oap"\n')).make_robust()
    assert recipe.name == "none"
    for bad, match in (
        ('robust = "clip"', "robust = 'clip' needs the norm to clip at"),
        ('robust = "root"', "robust.data, the data it trains on, go together"),
        ('robust = "none"\n[robust]\ndata = "root.npz"', "robust.data, the data it trains on"),
        ('robust = "krum"', "robust"),
        ('robust = "median"\n[rule]\nname = "fed-raa"', "compares the movements of a round"),
        ('robust = "median"\n[robust]\nhostile = 0.5', "hostile"),
    ):
        with pytest.raises(ConfigError, match=match):
            read_config(write(tmp_path, f"{TASK}{RUN}{bad}\n"))
