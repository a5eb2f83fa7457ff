"""Mixed precision: which Apex is taken, what is refused, and what a step that overflows leaves behind."""

import contextlib
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, command, edited, run
from test_recipes import TINY, step_losses

# Stand-ins for what people have under the name "apex": the files in it.
PACKAGES = {"none": [], "25.04": ["__init__", "amp", "parallel"], "25.07": ["__init__", "optimizers"]}
SGD = "SGD(net.parameters(), lr, momentum=0.95, weight_decay=5e-4, nesterov=True"
MOMENTUM = 'optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)'
SCALE = ("GradScaler(args.device)", "GradScaler(args.device, init_scale=256)")  # nothing overflows by itself


@pytest.fixture
def parse(tmp_path, monkeypatch, capsys):
    """Return a function that parses flags with a stand-in for Apex; it returns them, or what is said of them."""

    def parse_with(package, *flags, gpus=0, processes=1):
        for name in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split():
            monkeypatch.setenv(name, str(processes))
        for name in PACKAGES[package]:
            (tmp_path / "apex").mkdir(exist_ok=True)
            (tmp_path / "apex" / f"{name}.py").touch()
        monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not Path(p, "apex").exists())])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        with mock.patch.dict(sys.modules), contextlib.suppress(SystemExit):
            for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
                del sys.modules[name]
            recipe = runpy.run_path(str(ROOT / "apex_amp_train.py"))
            return recipe["parse_args"](["--device", "cuda" if gpus else "cpu", *flags])
        return capsys.readouterr().err.rpartition("error: ")[2]

    return parse_with


@pytest.mark.parametrize(("package", "gpus"), [("none", 1), ("25.04", 0), ("25.04", 1), ("25.07", 1)])
def test_apex_is_taken_only_if_it_is_asked_for_and_can_be_used(package, gpus, parse):
    assert parse(package, gpus=gpus).backend == "torch"
    if (package, gpus) == ("25.04", 1):
        assert parse(package, "--backend", "apex", gpus=gpus).precision == "O1 by apex"
    else:
        assert parse(package, "--backend", "apex", gpus=gpus).startswith("--backend apex needs a GPU, NVIDIA")


def test_what_is_not_there_is_refused(parse):
    assert parse("none", gpus=1, processes=2).startswith("not enough GPUs: each process needs one")
    assert "Apex 25.04 (see README), and no --compile" in parse("25.04", "--backend", "apex", "--compile", gpus=1)
    assert parse("25.04", "--opt-level", "O2", gpus=1).startswith("PyTorch has no O2 ")
    assert "cannot clip at O2" in parse("25.04", *"--backend apex --opt-level O2 --clip-grad 1".split(), gpus=1)


@pytest.mark.parametrize("optimizer", [SGD, "AdamW(net.parameters(), lr"])
def test_a_first_step_that_overflows_is_skipped_and_nothing_else(optimizer, tmp_path):
    inf = ("scaler.scale(loss)", "scaler.scale(loss * (math.inf if epoch == step == 1 else 1))")
    losses = []
    for kind in "fused", "foreach":  # the first skips the step by itself, the other one is not called
        edits = (f"{SGD}, fused", f"{optimizer}, {kind}"), (MOMENTUM, MOMENTUM if optimizer == SGD else "pass")
        folder = edited(tmp_path / kind, "apex_amp_train", inf, SCALE, *edits)
        flags = [*TINY, *"--epochs 2 --limit 24 --checkpoint run.pt".split()]
        losses.append(step_losses(run(command("apex_amp_train", *flags, nproc=1, folder=folder), cwd=folder)))
        assert torch.load(folder / "run.pt", weights_only=True)["scaler"]["scale"] == 128  # halved once
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=0.02)  # float16 rounds


@pytest.mark.parametrize("script", ["dp_train", "apex_amp_train"])
def test_the_optimizer_gets_gradients_of_the_norm_asked_for(script, tmp_path):
    norm = "nn.utils.clip_grad_norm_(net.parameters(), math.inf).item()"
    say = f"foreach=True)\n    optimizer.register_step_pre_hook(lambda *_: print('NORM', {norm}))\n"
    folder = edited(tmp_path / "project", script, ("fused=True)\n", say), *[SCALE] * (script == "apex_amp_train"))
    finished = run(command(script, *TINY, "--epochs", "1", "--clip-grad", "0.125", folder=folder))
    norms = [float(norm) for norm in re.findall("NORM (.*)", finished.stdout)]
    assert norms == [pytest.approx(0.125, rel=2e-3)] * 5, finished.stderr
