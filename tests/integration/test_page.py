"""The operator's page in a real browser: what people see and do, by mouse and by keyboard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator.operate.broker.embedded import embedded_broker, find_mosquitto
from coordinator.operate.config import HttpTable, read_config
from coordinator.operate.http.access.tokens import Role, token_path
from coordinator.operate.http.opening import open_http
from coordinator.operate.serve.runs import ServedRun, ServedRuns
from coordinator.operate.serve.serving import broker_table, serve
from coordinator.service.overview.facts import RunFacts
from coordinator.service.overview.overview import Overview
from edge_sdk.device.config import load_config
from edge_sdk.device.service.service import DeviceService
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.chromium import Visitor, find_chromium, open_chromium, visiting
from tests.integration.test_identity import TASK_FILE
from tests.staged_runs import StagedPage, staged_page
from tests.waiting import HANGS_S, free_port, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="needs Chromium: apt install chromium"
)

HOSTILE = "<img src=x onerror=document.title='hacked'>"
VIEWS = ("", "/fleet", "/strips", "/model", "/history", "/audit", "/device/kitchen")
NOBODY = r"status of 401"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_chromium() as found:
        yield found


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[StagedPage]:
    with staged_page(tmp_path) as found:
        yield found


@pytest.fixture
def visitor(browser: Browser, staged: StagedPage) -> Iterator[Visitor]:
    """An operator who has signed in."""
    with visiting(browser, staged.origin) as found:
        found.sign_in(staged.token())
        yield found


# -- a run that is served ----------------------------------------------------------------------

DEVICES = 20


class Fleet:
    """Devices of a run as threads of this process."""

    def __init__(self, folder: Path, broker: str) -> None:
        rng = np.random.default_rng(3)
        (folder / "data").mkdir()
        values = rng.normal(size=(24, 4)).astype(np.float32)
        np.savez(folder / "data/own.npz", x=values, y=rng.integers(0, 3, size=24))
        self._services = [self._device(folder, number, broker) for number in range(DEVICES)]
        self._threads = [threading.Thread(target=each.run) for each in self._services]

    @staticmethod
    def _device(folder: Path, number: int, broker: str) -> DeviceService:
        own = folder / f"device-{number:02}"
        own.mkdir()
        (own / "device.toml").write_text(
            f'task = "tiny"\nname = "{own.name}"\ndata = "../data"\nstate_dir = "{own / "state"}"\n'
            f"weigh = false\n{broker}"
        )
        return DeviceService(load_config(own / "device.toml", environment={}))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        for service in self._services:
            service.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(HANGS_S)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve a run with its broker and devices; gives the page's address and a token."""
    page = free_port()
    (folder / "task.py").write_text(TASK_FILE)
    said: list[str] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            serve(read_config(folder / "run.toml"), stop, said.append)
        except BaseException as error:
            failures.append(error)

    coordinator = threading.Thread(target=run)
    with ExitStack() as stack:
        settings = stack.enter_context(embedded_broker(folder / "broker", kind="mosquitto"))
        broker = broker_table(settings)
        (folder / "run.toml").write_text(
            '[task]\nname = "tiny"\nsource = "task.py:make_task"\n'
            '[run]\nfolder = "run"\nrounds = 100000\nsteps = 1\nbatch_size = 8\n'
            f"[round]\nmin_devices = {DEVICES}\nbid_s = 600\ntrain_deadline_s = 600\n"
            f"[http]\nport = {page}\n{broker}probe = false\n"
        )
        coordinator.start()
        stack.callback(coordinator.join, HANGS_S)
        stack.callback(stop.set)
        until(lambda: failures or any("waits for" in line for line in said), lambda: said)
        assert not failures, failures
        fleet = Fleet(folder, broker)
        stack.callback(fleet.stop)
        fleet.start()
        yield f"http://127.0.0.1:{page}", token_path(folder / "run", Role.OPERATE).read_text()
    assert not failures, failures


@pytest.mark.skipif(find_mosquitto() is None, reason="needs mosquitto")
def test_served_run_is_watched_paused_and_resumed(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as (origin, token), visiting(browser, origin) as visitor:
        visitor.sign_in(token.strip())
        page = visitor.page
        page.get_by_role("link", name="tiny").click()
        page.get_by_role("heading", name="tiny").wait_for()
        page.locator(".run-head .badge", has_text="running").wait_for()

        page.get_by_role("button", name="Pause").click()
        page.locator(".run-head .badge", has_text="paused").wait_for()
        page.get_by_text("Paused by operator").wait_for()

        page.get_by_role("link", name="Fleet", exact=True).click()
        page.get_by_text(f"{DEVICES} devices").wait_for()
        page.get_by_role("link", name="device-07").click()
        page.get_by_role("heading", name="device-07").wait_for()
        page.locator("dt", has_text="Movements counted").wait_for()

        page.get_by_role("link", name="Model", exact=True).click()
        page.locator("figure canvas").first.wait_for()

        rounds = r"Number(document.querySelector('.head-progress').textContent.match(/^\d+/)[0])"
        before = page.evaluate(rounds)
        page.get_by_role("button", name="Resume").click()
        page.locator(".run-head .badge", has_text="running").wait_for()
        visitor.wait_for(f"before => {rounds} > before", before)

        page.get_by_role("link", name="Audit", exact=True).click()
        page.get_by_role("cell", name="pause", exact=True).wait_for()
        page.get_by_role("cell", name="resume", exact=True).wait_for()


# -- signing in --------------------------------------------------------------------------------


def test_wrong_token_is_refused_and_the_right_one_taken(
    browser: Browser, staged: StagedPage
) -> None:
    with visiting(browser, staged.origin) as visitor:
        page = visitor.page
        visitor.open("#/run/digits/fleet")
        page.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="not valid").wait_for()
        assert page.get_by_label("Token").evaluate("each => each === document.activeElement")
        visitor.forgive(NOBODY)
        page.get_by_label("Token").fill(staged.token())
        page.keyboard.press("Enter")
        page.get_by_role("link", name="kitchen").wait_for()

        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("heading", name="Sign in").wait_for()
        page.reload()
        page.get_by_role("heading", name="Sign in").wait_for()


def test_stale_link_says_so_and_how_to_get_another(browser: Browser, staged: StagedPage) -> None:
    link = staged.page.link()
    with visiting(browser, staged.origin) as visitor:
        page = visitor.page
        page.goto(link)
        page.get_by_role("link", name="digits").wait_for()
        page.goto("about:blank")
        page.goto(link)  # who is signed in stays so
        page.get_by_role("link", name="digits").wait_for()
        visitor.forgive(NOBODY)
    with visiting(browser, staged.origin) as visitor:
        visitor.page.goto(link)
        words = "This link was used, or is too old: tessera-coordinator page RUN prints another"
        visitor.page.get_by_role("alert").filter(has_text=words).wait_for()
        visitor.forgive(NOBODY)


def test_link_signs_in_and_leaves_no_token_in_the_address(
    browser: Browser, staged: StagedPage
) -> None:
    with visiting(browser, staged.origin) as visitor:
        visitor.page.goto(staged.page.link())
        visitor.page.get_by_role("link", name="digits").wait_for()
        assert visitor.page.url == f"{staged.origin}/"
        visitor.page.reload()
        visitor.page.get_by_role("link", name="digits").wait_for()


def test_used_link_leaves_its_visitor_signed_in_to_runs_and_those_that_are_down(
    browser: Browser, staged: StagedPage
) -> None:
    staged.runs.show_down("bad.toml", "bad", staged.folder, f"bad.toml: {HOSTILE}")
    link = staged.page.link()
    with visiting(browser, staged.origin) as visitor:
        page = visitor.page
        page.goto(link)
        page.get_by_role("link", name="digits").wait_for()
        page.goto("about:blank")
        page.goto(link)
        page.get_by_role("link", name="digits").wait_for()
        visitor.forgive(NOBODY)
        down = page.get_by_role("link", name="bad")
        down.get_by_text("failed").wait_for()
        down.get_by_text(f"Is down: bad.toml: {HOSTILE}").wait_for()
        down.click()
        page.get_by_role("heading", name="bad").wait_for()
        page.get_by_text(f"Is down: bad.toml: {HOSTILE}").first.wait_for()
        for part in ("/fleet", "/strips", "/model", "/history"):
            visitor.go(f"#/run/bad{part}")
            page.locator("nav [aria-current=page]").wait_for()


def test_session_that_ended_leads_back_to_the_sign_in(browser: Browser, staged: StagedPage) -> None:
    with visiting(browser, staged.origin) as visitor:
        visitor.sign_in(staged.token())
        visitor.page.context.clear_cookies()
        visitor.page.get_by_role("heading", name="Sign in").wait_for()
        visitor.forgive(NOBODY)


def test_reader_has_no_buttons_to_steer(browser: Browser, staged: StagedPage) -> None:
    with visiting(browser, staged.origin) as visitor:
        visitor.sign_in(staged.token(Role.READ))
        page = visitor.page
        page.get_by_role("link", name="digits").click()
        page.get_by_text("2 of 30 rounds").first.wait_for()
        assert page.get_by_role("button", name="Pause").count() == 0
        visitor.go("#/run/digits/device/kitchen")
        page.get_by_role("heading", name="kitchen").wait_for()
        page.locator("dt", has_text="Battery").wait_for()
        assert page.get_by_role("button", name="Quarantine").count() == 0
        assert page.locator(".steering").count() == 0


# -- steering ----------------------------------------------------------------------------------


def answer(visitor: Visitor, button: str, verb: str, **fields: str) -> None:
    """Press a button, and answer the question that it asks."""
    page = visitor.page
    page.get_by_role("button", name=button).click()
    dialog = page.get_by_role("dialog")
    for label, value in fields.items():
        field = dialog.get_by_label(label.replace("_", " "))
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    dialog.get_by_role("button", name=verb, exact=True).click()
    dialog.wait_for(state="hidden")


def test_orders_are_sent_as_they_were_given(visitor: Visitor, staged: StagedPage) -> None:
    visitor.go("#/run/digits")
    answer(visitor, "Add rounds", "Add", Rounds="7")
    answer(visitor, "Change a setting", "Change", New_value="0.05")
    answer(visitor, "Stop", "Stop", When="now")
    visitor.go("#/run/digits/device/porch")
    answer(visitor, "Quarantine", "Quarantine", Reason="too loud")
    answer(visitor, "Forget", "Forget")
    by = {"by": "operator at 127.0.0.1"}
    assert staged.done == [
        ("rounds.add", {"rounds": 7, **by}),
        ("set", {"name": "learning_rate", "value": 0.05, **by}),
        ("stop", {"when": "now", **by}),
        ("quarantine.add", {"device": "porch", "reason": "too loud", **by}),
        ("forget", {"device": "porch", **by}),
    ]


def test_cancelled_question_does_nothing(visitor: Visitor, staged: StagedPage) -> None:
    visitor.go("#/run/digits")
    page = visitor.page
    for leave in ("Cancel", "Escape"):
        page.get_by_role("button", name="Stop").click()
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        if leave == "Cancel":
            dialog.get_by_role("button", name="Cancel").click()
        else:
            page.keyboard.press("Escape")
        dialog.wait_for(state="hidden")
    assert staged.done == []


def test_refusal_is_shown_in_the_dialog(visitor: Visitor, staged: StagedPage) -> None:
    staged.view.change("nobody")
    visitor.go("#/run/digits/device/nobody")
    page = visitor.page
    page.get_by_role("button", name="Forget").click()
    page.get_by_role("dialog").get_by_role("button", name="Forget", exact=True).click()
    page.get_by_role("alert").filter(has_text="no device 'nobody'").wait_for()
    page.keyboard.press("Escape")
    visitor.forgive(r"status of 4\d\d")
    assert staged.done == []


# -- what is shown -----------------------------------------------------------------------------


def test_changes_are_shown_as_they_come(visitor: Visitor, staged: StagedPage) -> None:
    visitor.go("#/run/digits/fleet")
    page = visitor.page
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="kitchen"))
    row.get_by_text("idle").wait_for()
    staged.view.change("kitchen", state="skipped", reason="battery 12 % is below 20 %")
    row.get_by_text("skipped").wait_for()
    row.get_by_text("battery 12 %").wait_for()
    staged.view.change("attic", state="training")
    page.get_by_role("link", name="attic").wait_for()
    assert page.get_by_text("3 devices").is_visible()


def test_overview_names_the_level_whose_accuracy_it_shows(
    visitor: Visitor, staged: StagedPage
) -> None:
    best = {"round": 2, "accuracy": 0.81, "level": 0.5}
    staged.view.state |= {"accuracy": 0.775, "deploy": 0.5, "best": best}
    visitor.go("#/run/digits")
    page = visitor.page
    page.locator(".figures > div", has_text="Accuracy to deploy80.0 %level 50 %").wait_for()
    page.locator(".figures > div", has_text="Accuracy, whole model77.5 %").wait_for()
    page.locator(".figures > div", has_text="Best accuracy81.0 %level 50 %, round 2").wait_for()
    page.get_by_role("rowheader", name="50 % (to deploy)").wait_for()
    visitor.go("#/")
    page.get_by_role("link", name="digits").filter(has_text="level 50 % 80.0 %").wait_for()


def test_pause_is_said_once_and_a_failure_with_its_reason(
    visitor: Visitor, staged: StagedPage
) -> None:
    since = "paused by root since 2026-11-18 21:46 UTC"
    paused = {"by": "root", "time": 1_700_000_000.0}
    staged.view.state |= {"state": "paused", "paused": paused, "waits_for": since}
    visitor.go("#/run/digits")
    page = visitor.page
    waits = page.locator(".waits", has_text="Paused by root")
    waits.wait_for()
    assert "aused by root" not in waits.inner_text().replace("Paused by root", "", 1)
    why = "rounds: must be a number"
    staged.view.state |= {"state": "failed", "paused": None, "waits_for": why}
    visitor.go("#/")
    page.get_by_text(f"Is down: {why}.").wait_for()


def test_run_that_is_not_served_shows_no_cards(visitor: Visitor) -> None:
    visitor.go("#/run/nope")
    page = visitor.page
    page.get_by_text("No run of the task nope is served here.").wait_for()
    assert page.locator(".part").is_hidden()
    assert page.locator(".tabs, .steering").evaluate_all("all => all.every((each) => each.hidden)")
    visitor.forgive(r"status of 404|ERR_")


def test_error_is_no_warning_once_the_device_has_trained(
    visitor: Visitor, staged: StagedPage
) -> None:
    trained = staged.view.history[-1]["time"]  # in the round of `StagedView.device`
    page = visitor.page
    for time, warns in ((trained + 1, True), (trained - 1, False)):
        staged.view.change("kitchen", last_error="the disk is full", last_error_time=time)
        visitor.go("#/")
        visitor.go("#/run/digits/device/kitchen")
        page.locator(".last-error", has_text="the disk is full").wait_for()
        assert page.locator(".last-error.over").count() == (0 if warns else 1)


def test_wide_table_shows_that_it_scrolls(visitor: Visitor, staged: StagedPage) -> None:
    reason = "needs more memory than there is, " * 5
    staged.view.change("kitchen", state="skipped", reason=reason)
    page = visitor.page
    page.set_viewport_size({"width": 390, "height": 780})
    visitor.go("#/run/digits/fleet")
    page.locator(".table-frame.more-right").wait_for()
    page.get_by_role("link", name="kitchen").focus()
    page.locator("td.cut", has_text=reason.strip()).wait_for()
    page.locator(".tabs.more-right").wait_for()
    page.evaluate("document.querySelector('.table-scroll').scrollLeft = 10_000")
    page.locator(".table-frame.more-left:not(.more-right)").wait_for()


def test_lost_connection_is_shown_until_it_is_back(visitor: Visitor) -> None:
    page = visitor.page
    page.route("**/events", lambda route: route.abort())
    visitor.go("#/run/digits")
    lost = page.get_by_text("Not connected to the coordinator")
    lost.wait_for()
    page.unroute("**/events")
    lost.wait_for(state="hidden")
    page.get_by_text("2 of 30 rounds").first.wait_for()
    visitor.forgive("ERR_FAILED")


def test_text_of_devices_is_never_html(visitor: Visitor, staged: StagedPage) -> None:
    name = "<b>kitchen"
    staged.view.change(
        name,
        state="skipped",
        reason=HOSTILE,
        last_error=HOSTILE,
        labels={HOSTILE: HOSTILE},
        profile=HOSTILE,
        version=HOSTILE,
        quarantined={"round": 2, "reason": HOSTILE},
    )
    staged.view.history[0]["event"] = HOSTILE
    staged.view.state |= {"waits_for": HOSTILE, "settings": {HOSTILE: HOSTILE}}
    page = visitor.page
    seen = {"": "Waits for <img", "/fleet": name, "/strips": name, "/history": HOSTILE}
    for part, words in seen.items():
        visitor.go(f"#/run/digits{part}")
        page.get_by_text(words).first.wait_for()
        assert page.locator("img[onerror], td b, th b").count() == 0
    page.get_by_role("link", name="Fleet", exact=True).click()
    page.get_by_role("link", name=name).click()
    page.get_by_role("heading", name=name).wait_for()
    page.locator(".last-error", has_text=HOSTILE).wait_for()
    assert page.locator("img[onerror], h2 b").count() == 0
    assert "hacked" not in page.title()


def test_map_of_blocks_is_drawn_and_can_be_read(visitor: Visitor) -> None:
    visitor.go("#/run/digits/model")
    page = visitor.page
    canvas = page.get_by_role("img", name="w: 1 block")
    canvas.wait_for()
    visitor.wait_for(
        """() => { const canvas = document.querySelector("figure canvas");
        return canvas.width > 0 && canvas.getContext("2d").getImageData(2, 2, 1, 1).data[3] > 0 }"""
    )
    canvas.focus()
    page.get_by_text("w, a 0, b 0: 6 parameters, trained 2 times").wait_for()
    for measure in ("age", "memory", "movement"):
        page.get_by_role("radio", name=measure, exact=True).check()
    page.get_by_text("Size of its last step").wait_for()
    page.get_by_text("The same as a table").click()
    page.get_by_role("row").filter(has_text="a 0, b 0").wait_for()


def test_curves_are_drawn_against_each_measure(visitor: Visitor) -> None:
    visitor.go("#/run/digits")
    page = visitor.page
    page.get_by_role("img", name="Accuracy against rounds. Newest: model 90.0 %").wait_for()
    for choice, words in (("hours", "hours"), ("energy", "kilojoules"), ("traffic", "megabytes")):
        page.get_by_role("radio", name=choice).check()
        page.get_by_role("img", name=f"Accuracy against {words}").wait_for()
    painted = page.evaluate(
        """() => { const canvas = document.querySelector(".uplot canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.some((value) => value > 0) }"""
    )
    assert painted
    page.get_by_role("button", name="level 50 %").click()
    assert page.get_by_role("button", name="level 50 %").get_attribute("aria-pressed") == "false"


# -- very many devices -------------------------------------------------------------------------

MANY = 2_000
MOST_ROWS = 60
"""Rows of a table in the document: those that fit on the screen, and a few more."""


def many_devices(folder: Path) -> ServedRuns:
    """A run whose overview knows very many devices."""
    plan = ModelPlan((Axis("a", (1, 1)),), (Tensor("w", "float32", (Dim(2, 0),)),))
    overview = Overview(RunFacts(task="many", run="0" * 16, folder=folder, plan=plan, rounds=9))
    overview.began()
    names = [f"device-{number:04}" for number in range(MANY)]
    for name in names:
        overview.joined(name)
    overview.asked(names, 1)
    for number, name in enumerate(names):
        level = None if number % 3 == 0 else 0.5
        reason = "battery 12 % is below 20 %" if level is None else "half is affordable"
        overview.bid(Bid(round=1, device=name, level=level, reason=reason, code="battery"))
    runs = ServedRuns()
    runs.add(ServedRun("many", folder, overview, {}))
    return runs


def test_very_many_devices_scroll_with_few_rows(browser: Browser, tmp_path: Path) -> None:
    runs = many_devices(tmp_path)
    with open_http(HttpTable(), runs, tmp_path) as opened:
        assert opened is not None
        with visiting(browser, opened.address) as visitor:
            visitor.page.goto(opened.link())
            page = visitor.page
            page.get_by_role("link", name="many").click()
            visitor.go("#/run/many/fleet")
            page.get_by_text("2,000 devices").wait_for()
            page.get_by_role("link", name="device-0000").wait_for()
            rows = "() => document.querySelectorAll('.grid tbody tr:not(.space)').length"
            assert 10 < page.evaluate(rows) < MOST_ROWS
            table = page.get_by_role("table", name="Devices")
            assert table.get_attribute("aria-rowcount") == "2001"
            for at, share in (("device-1000", 0.5), ("device-1999", 1.0)):
                page.evaluate(
                    "share => { const each = document.querySelector('.table-scroll');"
                    " each.scrollTop = share * (each.scrollHeight - each.clientHeight) }",
                    share,
                )
                page.get_by_role("link", name=at).wait_for()
                assert page.evaluate(rows) < MOST_ROWS
            assert page.get_by_role("link", name="device-0000").count() == 0

            page.get_by_label("Find").fill("battery")
            page.get_by_text("667 of 2,000 devices").wait_for()
            page.get_by_label("Find").fill("")
            page.get_by_role("button", name="skipped").click()
            page.get_by_text("667 of 2,000 devices").wait_for()
            page.get_by_role("button", name="Device", exact=True).click()
            page.get_by_role("columnheader", name="Device").and_(
                page.locator("[aria-sort=descending]")
            ).wait_for()
            visitor.go("#/run/many/strips")
            page.get_by_role("link", name="device-0000").wait_for()
            assert page.evaluate(rows) < MOST_ROWS


# -- by keyboard alone, on a small screen, for everybody -----------------------------------------


def test_keyboard_alone_is_enough(browser: Browser, staged: StagedPage) -> None:
    with visiting(browser, staged.origin) as visitor:
        visitor.open()
        page = visitor.page
        page.get_by_label("Token").wait_for()
        focused = "() => (document.activeElement.textContent || document.activeElement.id).trim()"

        def press_until(key: str, name: str) -> None:
            for _ in range(40):
                if page.evaluate(focused).startswith(name):
                    return
                page.keyboard.press(key)
            raise AssertionError(f"{name} is not reached by {key}")

        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.activeElement.id") == "main"
        press_until("Tab", "token")
        page.keyboard.type(staged.token())
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Runs").wait_for()
        page.get_by_role("link", name="digits").wait_for()
        press_until("Tab", "digits")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Pause").wait_for()
        press_until("Tab", "Fleet")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="porch").wait_for()
        press_until("Tab", "kitchen")
        page.keyboard.press("ArrowDown")
        assert page.evaluate(focused) == "porch"
        page.keyboard.press("ArrowDown")
        assert page.evaluate(focused) == "porch"
        page.keyboard.press("Home")
        assert page.evaluate(focused) == "kitchen"
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Quarantine").wait_for()
        press_until("Tab", "Quarantine")
        page.keyboard.press("Enter")
        page.get_by_role("dialog").wait_for()
        page.keyboard.type("loud")
        page.keyboard.press("Enter")
        page.get_by_role("dialog").wait_for(state="hidden")
        by = "operator at 127.0.0.1"
        order = {"device": "kitchen", "reason": "loud", "by": by}
        assert staged.done == [("quarantine.add", order)]


def see(visitor: Visitor, part: str) -> None:
    """Go to a part of the run, and wait until it shows something."""
    visitor.go(f"#/run/digits{part}")
    shown = {"": ".uplot", "/model": "figure canvas", "/device/kitchen": ".uplot"}
    wanted = shown.get(part, ".grid tbody th")
    visitor.page.locator(wanted).first.wait_for()


def test_small_screen_has_no_scroll_to_the_side(browser: Browser, staged: StagedPage) -> None:
    with visiting(browser, staged.origin, viewport={"width": 320, "height": 640}) as visitor:
        visitor.sign_in(staged.token())
        too_wide = "() => document.documentElement.scrollWidth - window.innerWidth"
        assert visitor.page.evaluate(too_wide) <= 0
        for part in VIEWS:
            see(visitor, part)
            assert visitor.page.evaluate(too_wide) <= 0, part


def serious(visitor: Visitor) -> list[str]:
    """Faults of accessibility that keep somebody out."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"resultTypes": ["violations"]}
    found = Axe().run(visitor.page, options=options).response["violations"]
    return [
        f"{each['id']}: {node['html'][:160]} {node['failureSummary']}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(browser: Browser, staged: StagedPage, scheme: str) -> None:
    states = ("training", "kept", "asked", "skipped", "paused", "quarantined", "barred", "offline")
    for state in states:
        staged.view.change(f"{state}-device", state=state, reason="a reason", last_error="an error")
    staged.view.history[0]["event"] = "learning_rate set to 0.1"
    staged.view.state |= {"waits_for": "2 devices", "state": "paused"}
    with visiting(browser, staged.origin, color_scheme=scheme) as visitor:
        visitor.open()
        visitor.page.get_by_label("Token").wait_for()
        assert serious(visitor) == []
        visitor.sign_in(staged.token())
        visitor.page.get_by_role("link", name="digits").wait_for()
        assert serious(visitor) == []
        for part in VIEWS:
            see(visitor, part)
            assert serious(visitor) == [], part
        visitor.page.get_by_role("button", name="Forget").click()
        visitor.page.get_by_role("dialog").wait_for()
        assert serious(visitor) == []


def test_colours_can_be_chosen_and_stay(visitor: Visitor) -> None:
    page = visitor.page
    ground = "() => getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.get_by_label("Colours").select_option("dark")
    after = page.evaluate(ground)
    assert after != before
    page.reload()
    page.get_by_role("heading", name="Runs").wait_for()
    assert page.evaluate(ground) == after
