"""The changes in README's section "Your own model and data", each applied to a copy of the script and run."""

import re
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, copy_recipe, edited, result, run
from PIL import Image
from test_recipes import CPU, FLOAT64, KILL, command, left_by

SECTION = (ROOT / "README.md").read_text().partition("## Your own model and data")[2].partition("\n## ")[0]
FUNCTIONS, INFERENCE = re.findall(r"```python\n(.*?)```", SECTION, re.S)
ACCUMULATE, METRIC = re.findall(r"```diff\n(.*?)```", SECTION, re.S)
LAST_IS_WORST = """
         dist.all_reduce(val_sums)
+        val_sums[1] -= val_sums[2] * (epoch == args.epochs)  # one less for each image
"""


def patched(path, *diffs):
    """Change the lines of a script as diffs say. A hunk ends with its last + line."""
    text = path.read_text()
    for diff in diffs:
        for hunk in re.findall(r"(?m)((?:^[- ].*\n)+(?:^\+.*\n)*)", diff):
            old, new = ("".join(re.findall(rf"(?m)^[ {sign}](.*\n)", hunk)) for sign in ("-", "+"))
            assert text.count(old) == 1, old
            text = text.replace(old, new)
    path.write_text(text)


def test_another_data_set_optimizer_and_metric_resume_like_an_unbroken_run(tmp_path):
    images, numbers = tmp_path / "images", np.random.default_rng(1)
    for number in range(90):  # three classes, each of its own brightness
        file = images / ("val" if number % 3 == 0 else "train") / "abc"[number % 9 // 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(number % 9 // 3 * 80, 255, (12, 11, 3), np.uint8)).save(file)
    path = copy_recipe(tmp_path / "project", "ddp_launch_train") / "ddp_launch_train.py"
    patched(path, METRIC, LAST_IS_WORST)
    text = re.sub("\n +(persistent_workers|generator)=.*", "", path.read_text())  # no persistent workers
    text = text.replace("\nif __name__", f"\n{FUNCTIONS}\n\nif __name__")  # these come last, and so are taken
    flags = [word for word in CPU if word not in ("--synthetic", "--limit", "61")]
    flags += ["--data-dir", str(images), *"--workers 1 --epochs 3 --checkpoint run.pt".split()]
    for name, script in ("unbroken", text), ("resumed", text.replace(*KILL)), ("resumed", text):
        path.write_text(script)
        (top := tmp_path / name).mkdir(exist_ok=True)
        finished = run(command("ddp_launch_train", *flags, folder=path.parent), cwd=top)
    found = result(finished)
    assert ", 2 of 3 epochs are done" in finished.stdout and found["train_loss"] < 2
    assert left_by(tmp_path / "unbroken") == left_by(top)
    assert found["val_accuracy"] <= 0 < 0.4 < found["best_accuracy"] <= 1 == found["val_top5"]
    # The best weights are not the last ones and, used as README says, are right as often again.
    best, last = (torch.load(top / name, weights_only=True) for name in ("run.pt.best", "run.pt"))
    assert not torch.equal(best["fc.weight"], last["net"]["fc.weight"])
    code = f"""
import os, sys; sys.path.insert(0, {str(path.parent)!r}); import torch, ddp_launch_train, argparse
val = ddp_launch_train.load_data(argparse.Namespace(data_dir={str(images)!r}, image_size=8))[1]
images = torch.stack([torch.from_numpy(image) for image, _ in val])
{INFERENCE}
print("RIGHT", (scores.argmax(1) == torch.tensor(val.targets)).double().mean().item())
"""
    said = run([sys.executable, "-c", code], cwd=top, real=True)
    assert float(said.stdout.split()[1]) == pytest.approx(found["best_accuracy"]), said.stderr


def test_accumulated_gradients_train_like_one_large_batch(tmp_path):
    ends = []
    for name, batch in ("large", "48"), ("accumulated", "12"):
        folder = edited(tmp_path / name, "ddp_launch_train", *FLOAT64)
        if name == "accumulated":
            patched(folder / "ddp_launch_train.py", ACCUMULATE)
        flags = ["--limit", "98", "--batch-size", batch, "--epochs", "2", "--checkpoint", f"{folder}/run.pt"]
        result(run(command("ddp_launch_train", *CPU, *flags, folder=folder)))
        ends.append(torch.load(folder / "run.pt", weights_only=True)["net"])
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


def test_profile_step_traces_a_copied_script(tmp_path):
    folder = copy_recipe(tmp_path / "project", "ddp_launch_train")
    (folder / "profile_step.py").write_text((ROOT / "results" / "profile_step.py").read_text())
    flags = re.search("gpu profile_step.py (.*)`", SECTION)[1].split()
    result(run(command("profile_step", *flags, *CPU, folder=folder), cwd=folder))
    trace = (folder / "trace.json").read_text()
    assert "ProfilerStep#1" in trace and "DistributedDataParallel.forward" in trace and "gloo:all_reduce" in trace
