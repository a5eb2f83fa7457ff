"""run_all.sh: the table, a script that fails, a script without a RESULT, wrong flags, Ctrl-C."""

import os
import re
import shutil
import signal
import sys

import pytest
import torch
from conftest import ROOT, SCRIPTS, copy_recipe, run, wait_until_gone

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shows run_all.sh without a GPU")


@pytest.fixture
def folder(tmp_path):
    folder = copy_recipe(tmp_path / "project", *SCRIPTS)
    shutil.copy(ROOT / "run_all.sh", folder)
    return folder


def run_all(folder, *flags):
    return run(["bash", str(folder / "run_all.sh"), *flags], PYTHON=sys.executable, timeout=600)


def test_wrong_flags_end_it_at_once_and_help_is_help(folder):
    for flag, sentence in ("--epoks", "unrecognized arguments"), ("--checkpoint", "does not take --checkpoint"):
        finished = run_all(folder, flag, "3")
        assert finished.returncode == 2 and finished.stdout == "" and not (folder / "logs").exists()
        assert sentence in finished.stderr.splitlines()[-1] and "Traceback" not in finished.stderr
    helped = run_all(folder, "--synthetic", "--help")
    assert helped.returncode == 0 and helped.stdout.startswith("Train with every script") and not helped.stderr


def test_the_demonstration_learns_and_a_failure_is_in_the_table(folder):
    broken = dict(ddp_spawn_train="raise SystemExit(3)", ddp_launch_train="print('quiet'); raise SystemExit")
    for script, line in broken.items():
        (folder / f"{script}.py").write_text(line)
    finished = run_all(folder)
    assert finished.returncode == 1, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if "|" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    names = [row[0] for row in rows[2:]]
    assert names == "one_process dp ddp_launch ddp_spawn torch_O0 torch_O1 torch_O3".split()
    by_name = {row[0]: dict(zip(rows[0], row, strict=False)) for row in rows[2:]}
    assert by_name.pop("ddp_spawn")["GPUs"].startswith("failed, exit code 3, no RESULT: see logs/")
    assert by_name.pop("ddp_launch")["GPUs"].startswith("failed, exit code 0, no RESULT: see logs/")
    for name, row in by_name.items():
        assert float(row["accuracy"].rstrip("%")) > 60, row
        assert row["processes"] == str(len(row["process ids"].split())) == ("2" if "torch" in name else "1")
    assert by_name["one_process"]["speed-up"] == "1.00"
    logs = folder / re.search(r"The logs and table.md are in (\S+)", finished.stderr)[1]
    assert (logs / "table.md").read_text() == finished.stdout


def test_ctrl_c_ends_it_and_says_where_the_logs_are(folder, start):
    running = start(["env", f"PYTHON={sys.executable}", "bash", str(folder / "run_all.sh"), "--epochs", "999"])
    pids = running.pids(1)
    running.wait_for("epoch 1 train_loss")
    os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
    assert running.process.wait(timeout=10) == 130, running.log.read_text()
    wait_until_gone(pids)
    assert re.search(r"Stopped. The logs are in logs/\S+\n$", running.log.read_text())
