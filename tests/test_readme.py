"""README's blocks of code, each applied to a copy of ddp_launch_train.py and run; and the files that it names."""

import re
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, command, copy_script, result, run
from PIL import Image
from test_gradients import FLOAT64

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


def test_the_eight_steps_are_lines_of_the_script():
    lines = {line.strip() for line in (ROOT / "ddp_launch_train.py").read_text().splitlines()}
    steps = [line.strip() for line in EIGHT_STEPS.splitlines() if line and not line.startswith("# ")]
    assert len(steps) >= 15 and not set(steps) - lines


def test_readme_names_files_that_exist():
    names = re.findall(r"\]\((?!https:)([^)#]*)", README) + re.findall(r"`([\w/.-]+\.(?:py|sh|csv))`", README)
    assert len(names) > 10 and not [name for name in names if not (ROOT / name).exists()]


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


def test_a_profile_of_a_copied_script(tmp_path):
    folder = copy_script(tmp_path / "copy", "ddp_launch_train")
    (folder / "profile_step.py").write_text((ROOT / "results" / "profile_step.py").read_text())
    arguments = command("ddp_launch_train", folder=folder)
    arguments[5:6] = [str(folder / "profile_step.py"), *re.search("gpu profile_step.py (.*)`", README)[1].split()]
    arguments += ["--epochs", "1"]
    assert result(run(arguments, cwd=folder))
    trace = (folder / "trace.json").read_text()
    assert "ProfilerStep#" in trace and "gloo:all_reduce" in trace


@pytest.mark.parametrize("tool", ["ruff check .", "shellcheck run_all.sh .ci/run"])
def test_the_code_is_clean(tool):
    name, *flags = tool.split()
    path = f"{sys.prefix}/bin/{name}"
    finished = run([path, *flags], cwd=ROOT)
    assert finished.returncode == 0, finished.stdout
