"""Mixed precision with Apex and torch.amp, and what only GPUs can show. Apex must be tag 25.04."""

import re
import shutil

import pytest
import torch
from conftest import (
    ALL_GPUS,
    EACH_STEP,
    GPUS,
    ROOT,
    SCRIPTS,
    SMALL_NET,
    block,
    changes,
    command,
    copy_script,
    result,
    run,
    saved_by,
)

from apex_amp_train import amp

FLAGS = "--image-size 8 --synthetic 240 --batch-size 24 --lr 0.002".split()


def run_and_resume(tmp_path, flags, *edits, **settings):
    """Run apex_amp_train.py for two epochs, and its second epoch again. Return the first run and both folders."""
    save = "            save_checkpoint(args, stateful, epoch, metrics)\n"
    keep = (save, f"{save}            os.system(f'cp run.pt run.pt.{{epoch}}')\n")
    unbroken = copy_script(tmp_path / "unbroken", "apex_amp_train", keep, *edits)
    arguments = command("apex_amp_train", *flags.split(), "--checkpoint", "run.pt", nproc=1, folder=unbroken)
    finished = run(arguments, cwd=unbroken, **settings)
    assert result(finished)
    (tmp_path / "resumed").mkdir()
    shutil.copy(unbroken / "run.pt.1", tmp_path / "resumed" / "run.pt")
    assert ": 1 epochs are done" in run(arguments, cwd=tmp_path / "resumed", **settings).stdout
    return finished, unbroken, tmp_path / "resumed"


def test_apex_scales_clips_and_steps_and_resumes_like_an_unbroken_run(tmp_path):
    on_cpu = ("(amp is None or args.compile or not torch.cuda.is_available())", "amp is None")
    flags, path = "--backend apex --opt-level O2 --clip-grad 0.5", str(ROOT / "tests" / "stand_in")
    finished, unbroken, resumed = run_and_resume(tmp_path, flags, on_cpu, PYTHONPATH=path)
    assert "epoch 1 loss scale 128" in finished.stdout and "overridden" not in finished.stderr
    assert re.findall("APEX (.*)", finished.stdout)[:6] == ["scale_loss", "master_params", "step"] * 2
    assert torch.load(resumed / "run.pt", weights_only=True)["amp"]["scale"]["loss_scaler0"]["loss_scale"] == 128
    assert saved_by(resumed) == saved_by(unbroken)


def test_torch_amp_unscales_before_it_clips_and_skips_a_step_that_overflows(tmp_path):
    norm = "nn.utils.clip_grad_norm_(net.parameters(), math.inf).item()"
    say = f"foreach=True)\n    optimizer.register_step_pre_hook(lambda *_: print('NORM', {norm}))\n"
    overflow = ("scaler.scale(loss)", "scaler.scale(loss * (math.inf if step == 1 else 1))")
    scale = ("GradScaler(device.type)", "GradScaler(device.type, init_scale=256)")
    folder = copy_script(tmp_path / "copy", "apex_amp_train", ("fused=True)\n", say), overflow, scale, SMALL_NET)
    finished = run(command("apex_amp_train", "--epochs", "1", "--clip-grad", "0.125", nproc=1, folder=folder))
    norms = [float(norm) for norm in re.findall("NORM (.*)", finished.stdout)]
    assert norms == [pytest.approx(0.125, rel=2e-3)] * 4, finished.stderr  # of five steps, the first is skipped
    assert "loss scale 128" in finished.stdout


def test_gradients_that_are_nan_in_each_step_end_the_run_though_its_loss_is_finite(tmp_path):
    nan = ("scaler.scale(loss)", "scaler.scale(loss * math.nan)")
    folder = copy_script(tmp_path / "copy", "apex_amp_train", nan, SMALL_NET)
    finished = run(command("apex_amp_train", "--epochs", "60", nproc=1, folder=folder))
    assert finished.returncode != 0 and "the loss scale is near 0" in finished.stderr
    assert finished.stdout.count("train_loss") == 6  # five steps in each: 30 times, the scale was halved


def train(script, *flags, edits=(), tmp_path):
    folder = copy_script(tmp_path / "copy", script, EACH_STEP, *edits)
    return run(command(script, *FLAGS, *flags, nproc=min(GPUS, 2), folder=folder), **ALL_GPUS)


def losses(finished):
    assert result(finished)["gpus"] >= 1
    return [float(loss) for loss in re.findall(r"step \d+/\d+ loss (\S+)", finished.stdout)]


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
@pytest.mark.parametrize("script", SCRIPTS[:3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_trains_on_all_gpus_and_compiled_alike(script, precision, tmp_path):
    eager = losses(train(script, "--precision", precision, tmp_path=tmp_path))
    if script == "dp_train" and GPUS > 1:
        return  # --compile is for one GPU
    compiled = losses(train(script, "--precision", precision, "--compile", tmp_path=tmp_path))
    # The first steps alone: on so small a network, rounding grows a thousandfold in the next ones.
    assert compiled[:2] == pytest.approx(eager[:2], rel=1e-3 if precision == "fp32" else 2e-2)


@pytest.mark.skipif(GPUS == 0 or amp is None, reason="needs a GPU and Apex 25.04")
def test_apexs_own_ddp_and_sync_bn_train_like_pytorchs(tmp_path):
    line = "        val_sums = validate("
    say = "        print('SUM', sum(w.double().sum().item() for w in net.parameters()), force=True)\n"
    flags = ["apex_amp_train", "--backend", "apex", "--sync-bn", "--epochs", "1"]
    apex = train(*flags, edits=[*changes(block("apex ddp")), (line, say + line)], tmp_path=tmp_path)
    pytorch = train(*flags, tmp_path=tmp_path)
    assert losses(apex)[:3] == pytest.approx(losses(pytorch)[:3], rel=2e-2)
    assert len(set(re.findall(r"SUM (\S+)", apex.stdout))) == 1  # the same weights on all ranks


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
@pytest.mark.parametrize("level", ["torch", "O0", "O1", "O2", "O3"] if amp else ["torch"])
def test_every_level_trains_clips_and_resumes_like_an_unbroken_run(level, tmp_path):
    line = "    train_set, val_set"
    same = (line, f"    torch.backends.cudnn.deterministic = True\n{line}")
    apex = "" if level == "torch" else f" --backend apex --opt-level {level}"
    finished, *folders = run_and_resume(tmp_path, " ".join(FLAGS) + " --clip-grad 1" + apex, same, **ALL_GPUS)
    assert result(finished)["gpus"] == 1 and "overridden" not in finished.stderr
    weights = [torch.load(folder / "run.pt", "cpu", weights_only=True)["net"] for folder in folders]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)
