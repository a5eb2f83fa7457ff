"""What README shows: its blocks of code, each applied to a copy of ddp_launch_train.py and run, and run_all.sh."""

import os
import re
import shutil
import signal
import statistics
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL, command, copy_script, result, run
from PIL import Image
from test_gradients import FLOAT64

from results import draw

README = (ROOT / "README.md").read_text()
EIGHT_STEPS, OWN_DATA, INFERENCE = (
    README.partition(words)[2].split("```")[1].removeprefix("python\n")
    for words in ("eight additions", "AdamW with two", "the best weights")
)
ACCUMULATION, METRIC, TENSORBOARD = re.findall(r"```diff\n(.*?)```", README, re.S)


def changes(*diffs):
    """Return diffs of README as changes for copy_script. A change ends with its last + line."""
    hunks = re.findall(r"(?m)((?:^[- ].*\n)+(?:^\+.*\n)+)", "".join(diffs))
    return [["".join(re.findall(rf"(?m)^[ {sign}](.*\n)", hunk)) for sign in "-+"] for hunk in hunks]


@pytest.mark.parametrize("script", ["ddp_launch_train", "apex_amp_train"])
def test_the_eight_steps_are_lines_of_the_scripts(script):
    text = (ROOT / f"{script}.py").read_text()
    lines = {line.partition("  # ")[0].strip() for line in text.splitlines()}
    steps = {line.strip() for line in EIGHT_STEPS.splitlines() if line and not line.startswith("# ")}
    assert len(steps) >= 15 and not steps - lines


def test_tables_of_results_are_medians_of_runs_csv():
    kinds = [(kind, f"{round(statistics.median(found), -2):,.0f}") for kind, found in draw.speeds().items()]
    medians = {kind[:3]: median for kind, median in kinds if "Python only" not in kind[3]}
    rows = re.findall(r"(?m)^\| `(\w+\.py)(.*)` \|(.*)\|(.*)\|(.*)\|$", README.partition("## Results")[2])
    assert len(rows) == 6
    for script, flag, *cells in rows:
        for gpus, cell in zip((1, 2, 4), cells):
            flags = {"--batch-size": str(512 * gpus)} | dict([(flag.split() + [""])[:2]] if flag else [])
            if script == "apex_amp_train.py":
                flags = {"--backend": "torch", "--opt-level": "O1"} | flags
            flags = " ".join(f"{name} {flags[name]}".strip() for name in sorted(flags))
            assert cell.strip() in (medians.get((script, flags, str(gpus))), "")
    page = (ROOT / "results" / "README.md").read_text()
    for number in "8,838", "23,925", "24,407":  # nn.DataParallel, Lightning, a ceiling
        assert number in page
        assert number in [f"{statistics.median(found):,.0f}" for found in draw.speeds().values()]


def test_own_images_two_learning_rates_another_metric_tensorboard_and_inference(tmp_path):
    images, random = tmp_path / "images", np.random.default_rng(1)
    for number in range(90):  # three classes, each of its own brightness
        file = images / ("val" if number % 3 == 0 else "train") / "abc"[number % 9 // 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(number % 9 // 3 * 80, 255, (12, 11, 3), np.uint8)).save(file)
    own = ("\nif __name__", f"\n{OWN_DATA}\n\nif __name__")  # these functions come last, and so are used
    folder = copy_script(tmp_path / "copy", "ddp_launch_train", *changes(METRIC, TENSORBOARD), own)
    flags = ["--data-dir", str(images), *"--workers 1 --epochs 5 --checkpoint run.pt".split()]
    found = result(run(command("ddp_launch_train", *flags, folder=folder), cwd=folder))
    assert found["best_accuracy"] > 0.4 and found["val_top5"] == 1
    assert len(list(folder.glob("runs/*/events*"))) == 1  # of rank 0 alone
    code = f"""
import argparse, torch, ddp_launch_train
val = ddp_launch_train.load_data(argparse.Namespace(data_dir={str(images)!r}, image_size=4))[1]
images = torch.stack([torch.from_numpy(image) for image, _ in val])
{INFERENCE}
print((scores.argmax(1) == torch.tensor(val.targets)).double().mean().item())
"""
    said = run([sys.executable, "-c", code], cwd=folder)
    assert float(said.stdout) == pytest.approx(found["best_accuracy"]), said.stderr


def test_accumulated_gradients_train_like_one_large_batch(tmp_path):
    weights = []
    for batch, diffs in ("48", ()), ("12", (ACCUMULATION,)):
        folder = copy_script(tmp_path / batch, "ddp_launch_train", *FLOAT64, *changes(*diffs))
        flags = ["--limit", "98", "--batch-size", batch, "--checkpoint", "run.pt"]
        result(run(command("ddp_launch_train", *flags, folder=folder), cwd=folder))
        weights.append(torch.load(folder / "run.pt", weights_only=True)["net"])
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


def test_the_slurm_job_starts_torchrun_on_each_node(tmp_path):
    [job] = re.findall(r"```bash\n#!/bin/bash\n(.*?)```", README, re.S)
    job = job.replace("per-node=gpu", "per-node=1").replace("_train.py", f"_train.py {' '.join(SMALL)}")
    slurm = """export SLURM_JOB_ID=$$ SLURM_JOB_NODELIST= SLURM_NNODES=2 SLURM_CPUS_PER_TASK=1
    scontrol() { echo 127.0.0.1; }  # both nodes are this machine
    srun() { for node in 0 1; do SLURM_NODEID=$node "${@:3}" & done; wait -n && wait -n; }"""
    copy_script(tmp_path, "ddp_launch_train")
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    assert result(run(["bash", "-c", f"{slurm}\n{job}"], cwd=tmp_path, PATH=path))["world_size"] == 2


def test_a_profile_of_a_copied_script(tmp_path):
    folder = copy_script(tmp_path / "copy", "ddp_launch_train")
    (folder / "profile_step.py").write_text((ROOT / "results" / "profile_step.py").read_text())
    arguments = command("ddp_launch_train", folder=folder)
    arguments[5:6] = [str(folder / "profile_step.py"), *re.search("gpu profile_step.py (.*)`", README)[1].split()]
    assert result(run(arguments, cwd=folder))
    trace = (folder / "trace.json").read_text()
    assert "ProfilerStep#" in trace and "gloo:all_reduce" in trace


def test_run_all_learns_without_a_gpu_and_shows_failures_in_its_table(tmp_path):
    for script in SCRIPTS:
        folder = copy_script(tmp_path / "copy", script)
    start = ["bash", shutil.copy(ROOT / "run_all.sh", folder)]
    settings = dict(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    refused = run([*start, "--epoks", "3"], **settings)
    assert refused.returncode == 2 and "unrecognized arguments: --epoks" in refused.stderr.splitlines()[-1]
    # One script leaves a process behind that keeps its output open; run_all.sh must not wait for it.
    leave = "import os; os.system('sleep 100 & echo LEFT $!'); raise SystemExit(3)"
    (folder / "ddp_spawn_train.py").write_text(leave)
    (folder / "ddp_launch_train.py").write_text("print('no result')")
    finished = run(start, **settings)
    os.kill(int(re.search(r"LEFT (\d+)", finished.stderr)[1]), signal.SIGKILL)
    assert finished.returncode == 1, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if "|" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    table = {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}
    assert list(table) == ["one_process", "dp", "ddp_launch", "ddp_spawn", "torch_O1"]
    assert table["ddp_launch"]["GPUs"].startswith("failed, exit code 0: see logs/")
    assert table["ddp_spawn"]["GPUs"].startswith("failed, exit code 3: see logs/")
    for name in "one_process", "dp", "torch_O1":
        assert float(table[name]["accuracy"].rstrip("%")) > 60 and float(table[name]["images/s"]) > 0
        assert table[name]["processes"] == ("2" if name == "torch_O1" else "1")
    assert table["one_process"]["speed-up"] == "1.00"
    logs = folder / re.search(r"The logs and table.md are in (\S+)", finished.stderr)[1]
    assert (logs / "table.md").read_text() == finished.stdout
