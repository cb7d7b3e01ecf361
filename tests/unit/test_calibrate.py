# SPDX-License-Identifier: Apache-2.0
"""From compiler and runtime logs to the next cap, and the file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_omni_patch.patches.available_memory import calibrate
from vllm_omni_patch.patches.available_memory.budget import GIB, split_kv_budget
from vllm_omni_patch.patches.available_memory.calibrate import Attempt, CalibrationError, Key, Row, next_row
from vllm_omni_patch.patches.available_memory.calibrate_cli import calibrate as command
from vllm_omni_patch.patches.available_memory.neuron_logs import budget_line, read_attempts

KEY = Key("Qwen3ForCausalLM", "none", 4, 2, "trn2", "2.21.18209.0")
REQUESTED = 23_192_823_398  # 24 GiB x 0.9
KV = 6_957_847_019  # x 0.30
TRN2 = 25_769_803_776
MARGIN = calibrate.DEFAULT_MARGIN

# The texts are laid out as the compiler's and runtime's published messages; numbers are those of the example.
EVRF009 = (
    "[NCC_EVRF009] The total size of input and output tensors exceeds HBM limit of Trainium2. "
    "Needed 27,487,790,694 bytes (25.6 GB) vs. available 25,769,803,776 bytes (24 GB)."
)
EOOM = (
    "[NCC_EOOM002] Maximum peak HBM usage of 25.50GB exceeds HBM limit of 24.00GB. The peak consists of I/O tensors "
    "(20.10GB), internal (scratchpad) (5.40GB)."
)
ALLOCATE = 'ERROR NRT:nrt_tensor_allocate failed, nrt_tensor_allocate status=4, message="Allocation Failure"'


def line(kv: int = KV, total: int = REQUESTED, cap: float | None = 0.30, key: Key = KEY, minimum: int = GIB) -> str:
    record = budget_line(key, kv, total, minimum, cap, "cap", 0.9)
    return f"(Worker_TP0 pid=71) INFO 11-29 10:00:00 [hooks_neuron.py:250] {record}\n"


def attempt(outcome: Any = "failed", kv: int = KV, excess: int | None = None, **more: Any) -> Attempt:
    return Attempt(KEY, kv, REQUESTED, outcome, excess=excess, **more)


# -- reading logs


def test_the_published_example() -> None:
    """KV 6.48 GiB, 25.6 GiB needed of 24: at most 4.88 GiB, a cap of 0.2259."""
    (found,) = read_attempts("serve.log", line() + EVRF009)
    assert (found.key, found.kv_bytes, found.outcome) == (KEY, KV, "failed")
    assert found.excess == 27_487_790_694 - TRN2
    row = next_row(found, None, margin=0)
    assert row.cap == 0.2259
    assert row.kv_bytes <= KV - found.excess < row.kv_bytes + 3 * (1 << 20)
    assert next_row(found, None).kv_bytes <= KV - found.excess - MARGIN


@pytest.mark.parametrize(
    ("text", "excess"),
    [
        (EVRF009, 27_487_790_694 - TRN2),
        (
            EVRF009.replace(". Needed", ".\nINFO next line\n    Needed").replace(" vs. ", "\n vs. "),
            27_487_790_694 - TRN2,
        ),
        ("NCC_EVRF009: Needed 25.6 GB vs. available 24 GB", int(25.6 * GIB) - 24 * GIB + GIB // 100),
        (EOOM, int(1.5 * GIB) + GIB // 100),
        (EOOM.replace("EOOM002", "EOOM001"), int(1.5 * GIB) + GIB // 100),
        (ALLOCATE, None),
        ("NRT_RESOURCE: not enough device memory", None),
        ("nrt_load_collectives: Allocation Failure", None),
        ("NCC_EVRF009 without any figures", None),
    ],
)
def test_each_failure(text: str, excess: int | None) -> None:
    (found,) = read_attempts("serve.log", line() + text)
    assert (found.outcome, found.excess) == ("failed", excess)
    assert found.evidence[0].startswith("serve.log:2: N") or found.evidence[0].startswith("serve.log:2: nrt")


def test_figures_of_a_later_message_are_not_taken_for_an_earlier_one() -> None:
    (found,) = read_attempts("serve.log", line() + "NCC_EVRF009 cut short\n" + EVRF009)
    assert len(found.evidence) == 2 and found.excess == 27_487_790_694 - TRN2
    assert "above" not in found.evidence[0]


def test_the_largest_excess_of_all_ranks_counts() -> None:
    other = EVRF009.replace("27,487,790,694", "27,500,000,000")
    (found,) = read_attempts("serve.log", line() + EVRF009 + "\n" + other + "\n" + line() + EVRF009)
    assert found.excess == 27_500_000_000 - TRN2 and len(found.evidence) == 3


def test_a_start_that_finished() -> None:
    (found,) = read_attempts("serve.log", line() + "INFO:     Application startup complete.\n")
    assert found.outcome == "worked"


def test_a_failure_after_the_start_is_a_failure() -> None:
    (found,) = read_attempts("serve.log", line() + "Application startup complete.\n" + ALLOCATE)
    assert found.outcome == "failed"


def test_several_starts_in_one_log() -> None:
    second = 5_239_258_805
    text = line() + EVRF009 + "\n" + line(second, cap=0.2259) + "Application startup complete.\n" + line(second)
    assert [(one.kv_bytes, one.outcome) for one in read_attempts("serve.log", text)] == [
        (KV, "failed"),
        (second, "worked"),
        (second, "unknown"),
    ]


def test_a_failure_without_a_budget_is_not_guessed_at() -> None:
    with pytest.raises(CalibrationError, match=r"cc\.log:1: 'NCC_EVRF009' without a KV budget before it"):
        read_attempts("cc.log", EVRF009)
    (found,) = read_attempts("cc.log", EVRF009, attempt("unknown"))
    assert found.outcome == "failed"


def test_a_refused_budget_is_no_case_for_a_lower_cap() -> None:
    text = "RuntimeError: Computed KV cache budget is below minimum threshold: 0.60 GiB"
    with pytest.raises(CalibrationError, match="a lower cap makes it smaller"):
        read_attempts("serve.log", text)


@pytest.mark.parametrize("damage", ['"kv_bytes": 6', '"key": {', "Qwen3"])
def test_a_damaged_record_is_an_error(damage: str) -> None:
    broken = line().replace(damage, damage.replace(":", "="), 1) if ":" in damage else line().replace('"lnc"', '"l"')
    with pytest.raises(CalibrationError, match="damaged"):
        read_attempts("serve.log", broken)


def test_a_log_without_anything() -> None:
    assert read_attempts("serve.log", "INFO hello\n") == []


# -- the next cap


def test_a_failure_without_a_number_is_halved_towards_the_minimum() -> None:
    row = next_row(attempt(), None)
    lowest = -(-GIB * 10_000 // REQUESTED) / 10_000
    assert row.cap == pytest.approx((0.30 + lowest) / 2, abs=1e-4)
    assert row.failed_cap == pytest.approx(0.30)
    assert "half-way" in row.why


def test_halving_goes_towards_what_served_and_stops_there() -> None:
    row = next_row(attempt("worked", kv=int(REQUESTED * 0.1)), None)
    assert (row.cap, row.worked_cap) == (0.1, 0.1)
    caps = []
    for _ in range(30):
        row = next_row(attempt(kv=int(REQUESTED * 0.3) if not caps else row.kv_bytes), row)
        if caps and row.cap == caps[-1]:
            break
        caps.append(row.cap)
        if row.cap == 0.1:
            break
    assert caps[0] == 0.2 and caps == sorted(caps, reverse=True) and caps[-1] == 0.1
    assert len(caps) <= 8


def test_what_served_is_kept_to_the_byte() -> None:
    # The budget was bound by the bytes in use, not by the cap; a lower cap now would change the block count.
    row = next_row(attempt("worked", kv=3_736_621_548, cap=0.30), None)
    assert (row.cap, row.kv_bytes) == (0.30, 3_736_621_548)
    assert row.worked_cap is not None and row.worked_cap <= 3_736_621_548 / REQUESTED


def test_a_known_cap_is_better_than_a_computed_lower_one() -> None:
    row = next_row(attempt("worked", kv=int(REQUESTED * 0.25)), None)
    row = next_row(attempt(excess=27_487_790_694 - TRN2), row)  # the figures alone would allow 0.2143
    assert row.cap == 0.25 and "known to serve" in row.why


def test_a_cap_that_fails_now_no_longer_counts_as_known() -> None:
    row = next_row(attempt("worked"), None)
    row = next_row(attempt(), row)
    assert row.worked_cap is None and row.cap < 0.30


def test_no_room_above_the_minimum_is_said() -> None:
    with pytest.raises(CalibrationError, match="below the minimum of 1073741824 bytes"):
        next_row(attempt(excess=6 * GIB), None)
    with pytest.raises(CalibrationError, match="nothing between"):
        next_row(attempt(kv=GIB + (1 << 20)), None)
    with pytest.raises(CalibrationError, match="no lower cap is above the minimum"):
        next_row(attempt(kv=GIB // 2), None)
    assert next_row(attempt(kv=GIB // 2, minimum=0), None).cap > 0


@pytest.mark.parametrize(
    "bad",
    [
        attempt(kv=0),
        attempt(kv=REQUESTED + 1),
        Attempt(KEY, 5, 0, "failed"),
        attempt("unknown"),
        attempt(excess=0),
        attempt(excess=-5),
    ],
)
def test_attempts_that_tell_nothing(bad: Attempt) -> None:
    with pytest.raises(CalibrationError):
        next_row(bad, None)


@given(
    total=st.integers(4 * GIB, 40 * GIB),
    part=st.floats(0.05, 1),
    excess=st.integers(1, 30 * GIB),
    margin=st.integers(0, GIB),
)
def test_the_next_budget_always_frees_the_excess(total: int, part: float, excess: int, margin: int) -> None:
    tried = Attempt(KEY, max(int(total * part), 1), total, "failed", 0, None, excess)
    try:
        row = next_row(tried, None, margin)
    except CalibrationError:
        assert tried.kv_bytes - excess - margin < total / 10_000 + 1
        return
    assert 0 < row.cap <= 1
    # What the worker will compute with the new cap is what the row says, and it fits.
    assert split_kv_budget(total, 0, 1.0, row.cap).available == row.kv_bytes <= tried.kv_bytes - excess - margin


@given(total=st.integers(1, 1 << 45), part=st.floats(0, 1))
def test_floor_cap_never_gives_more(total: int, part: float) -> None:
    kv = int(total * part)
    cap = calibrate.floor_cap(kv, total)
    assert int(total * cap) <= kv
    assert cap == 1 or int(total * (cap + 1.5e-4)) >= kv


# -- the file


def row(**changes: Any) -> Row:
    made = Row(KEY, 0.2259, 5_239_258_805, REQUESTED, 0.3, None, "because", ["serve.log:2: NCC_EVRF009"])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_file_keeps_every_field(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "cal.json")
    calibrate.save(path, [row()])
    rows, digest = calibrate.load(path)
    assert rows == [row()] and len(digest) == 12
    calibrate.save(path, [row(cap=0.2)])
    assert calibrate.load(path)[1] != digest


def test_one_row_per_key() -> None:
    other = row(key=Key("Other", "none", 4, 2, "trn2", "2"))
    assert calibrate.with_row([row(), other], row(cap=0.2)) == [other, row(cap=0.2)]


@pytest.mark.parametrize(
    "changes",
    [{"cap": 0}, {"cap": 1.5}, {"cap": "0.2"}, {"cap": None}, {"cap": True}, {"kv_bytes": 0}, {"kv_bytes": 1.5}]
    + [{"total_budget": -1}, {"failed_cap": 2}, {"extra": 1}, {"key": {"architecture": "x"}}],
)
def test_a_row_that_makes_no_sense_is_an_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "cal.json"
    calibrate.save(str(path), [row()])
    data = json.loads(path.read_text())
    data["rows"][0].update(changes)
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match="not usable"):
        calibrate.load(str(path))


def test_nan_in_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cal.json"
    calibrate.save(str(path), [row(cap=float("nan"))])
    with pytest.raises(CalibrationError, match="not usable"):
        calibrate.load(str(path))


def unknown(**changes: Any) -> Key:
    return Key(**{**vars(KEY), **changes})


def test_a_row_is_found_by_its_whole_key() -> None:
    rows = [row()]
    assert calibrate.find(rows, KEY) == rows[0]
    for changes in ({"tensor_parallel_size": 8}, {"lnc": 1}, {"target": "trn3"}, {"compiler": "2.22"}):
        assert calibrate.find(rows, unknown(**changes)) is None


def test_a_host_without_the_compiler_takes_the_only_row() -> None:
    assert calibrate.find([row()], unknown(compiler="unknown")) == row()
    two = [row(), row(key=unknown(compiler="2.22"))]
    with pytest.raises(CalibrationError, match="several compilers"):
        calibrate.find(two, unknown(compiler="unknown"))


@pytest.mark.parametrize("part", ["architecture", "target", "lnc"])
def test_no_other_unknown_part_matches(part: str) -> None:
    key = unknown(**{part: "unknown"})
    assert calibrate.find([row(key=key)], key) is None


# -- the command


@pytest.fixture
def run(tmp_path: Path) -> Any:
    app = typer.Typer()
    app.command()(command)
    runner = CliRunner()

    def call(*arguments: str, **logs: str) -> Any:
        paths = []
        for name, text in logs.items():
            path = tmp_path / f"{name}.log"
            path.write_text(text)
            paths.append(str(path))
        return runner.invoke(app, [*paths, "--output", str(tmp_path / "cal.json"), *arguments])

    return call


def test_the_command_writes_and_says_why(tmp_path: Path, run: Any) -> None:
    result = run(serve=line() + EVRF009)
    assert result.exit_code == 0, result.output
    (written,), _ = calibrate.load(str(tmp_path / "cal.json"))
    assert written.key == KEY and written.kv_bytes == int(REQUESTED * written.cap)
    assert "because cap 0.3 gave 6.48 GiB of KV, 1.60 GiB more" in result.output
    assert "VLLM_OMNI_PATCH_NEURON_CALIBRATION=" in result.output


def test_starts_until_one_serves(tmp_path: Path, run: Any) -> None:
    """Each start uses what the command wrote; the device serves anything up to 4.9 GiB."""
    kv, cap = KV, 0.30
    for step in range(6):
        served = kv <= int(4.9 * GIB)
        ending = "Application startup complete." if served else ALLOCATE
        assert run(**{f"s{step}": line(kv, cap=cap) + ending}).exit_code == 0
        (written,), _ = calibrate.load(str(tmp_path / "cal.json"))
        if served:
            break
        kv, cap = min(int(REQUESTED * written.cap), written.kv_bytes), written.cap
    assert served and (written.cap, written.kv_bytes) == (cap, kv)
    assert written.worked_cap is not None and written.failed_cap is not None


def test_logs_of_several_ranks_are_one_start(tmp_path: Path, run: Any) -> None:
    worse = EVRF009.replace("27,487,790,694", "28,000,000,000")
    assert run("--margin-mib", "0", a=line() + worse, b=line() + EVRF009, c=line()).exit_code == 0
    (written,), _ = calibrate.load(str(tmp_path / "cal.json"))
    assert written.kv_bytes <= KV - (28_000_000_000 - TRN2)
    assert len(written.evidence) == 2


def test_other_rows_are_kept(tmp_path: Path, run: Any) -> None:
    other = row(key=Key("Other", "none", 4, 2, "trn2", "2"))
    calibrate.save(str(tmp_path / "cal.json"), [other])
    assert run(serve=line() + EVRF009).exit_code == 0
    rows, _ = calibrate.load(str(tmp_path / "cal.json"))
    assert [one.key.architecture for one in rows] == ["Other", "Qwen3ForCausalLM"]


def test_a_dry_run_writes_nothing(tmp_path: Path, run: Any) -> None:
    result = run("--dry-run", serve=line() + EVRF009)
    assert result.exit_code == 0 and "Nothing was written" in result.output
    assert not (tmp_path / "cal.json").exists()


TOLD = ("--kv-bytes", str(KV), "--total-budget", str(REQUESTED), "--architecture", "A", "--target", "trn2")


def test_a_compiler_log_alone_with_the_start_told(tmp_path: Path, run: Any) -> None:
    assert run(*TOLD, cc=EVRF009).exit_code == 0
    (written,), _ = calibrate.load(str(tmp_path / "cal.json"))
    assert written.key == Key("A", "none", 1, 2, "trn2", "unknown")


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        ((), "INFO hello", "hold no 'Neuron KV budget record' line"),
        ((), EVRF009, "without a KV budget before it"),
        ((), line(), "Neither a known failure nor a finished start"),
        (TOLD[:4], EVRF009, "--architecture and --target together"),
        ((), line() + EVRF009.replace("27,487", "99,487"), "below the minimum"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_written(
    tmp_path: Path, run: Any, arguments: tuple[str, ...], text: str, said: str
) -> None:
    result = run(*arguments, serve=text)
    assert result.exit_code == 1 and said in result.output
    assert not (tmp_path / "cal.json").exists()


def test_a_log_that_is_not_there(run: Any) -> None:
    result = run("/does/not/exist.log")
    assert result.exit_code == 1 and "cannot be read" in result.output
