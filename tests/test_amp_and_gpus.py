"""Mixed precision with Apex and torch.amp, and what only GPUs can show. Apex must be tag 25.04."""

import re
import shutil

import pytest
import torch
from conftest import GPUS, ON_GPUS, command, result, run, train
from editing import APEX_ON_THE_CPU, RESNET, ROOT, SMALL_MODEL, copy_script
from pages import before

from apex_amp_train import amp

FLAGS = "--image-size 8 --synthetic 240 --batch-size 24 --lr 0.002".split()
needs_apex = pytest.mark.skipif(GPUS == 0 or amp is None, reason="needs a GPU and Apex 25.04")
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def run_and_resume(folder, start, *edits):
    """Run apex_amp_train.py for two epochs, and its second epoch again. Return both runs, and what they saved."""
    save = "            save_checkpoint(args.checkpoint, flags, stateful, epoch, metrics, improved)\n"
    keep = (save, f"{save}            os.system(f'cp run.pt run.pt.{{epoch}}')\n")
    copy_script(folder, "apex_amp_train", keep, *edits)
    first = start()
    uninterrupted = torch.load(folder / "run.pt", "cpu", weights_only=True)
    shutil.copy(folder / "run.pt.1", folder / "run.pt")
    second = start()
    assert ": 1 epochs are done" in second.stdout
    return first, second, uninterrupted, torch.load(folder / "run.pt", "cpu", weights_only=True)


# Prints the type of the model's outputs, which is float32 without autocast.
SAY_TYPE = before("    loss = nn.functional.cross_entropy(", "print('TYPE', outputs.dtype)\n")


def test_apex_scales_clips_and_steps_and_resumes_like_an_uninterrupted_run(tmp_path):
    shutil.copytree(ROOT / "tests" / "stand_in", tmp_path, dirs_exist_ok=True)
    flags = "--backend apex --opt-level O2 --clip-grad 0.5".split()
    start = lambda: train(tmp_path, 1, *flags, script="apex_amp_train")  # noqa: E731
    first, second, *saved = run_and_resume(tmp_path, start, APEX_ON_THE_CPU, SMALL_MODEL, SAY_TYPE)
    assert "epoch 1 loss scale 128" in first.stdout and "overridden" not in first.stdout
    assert "APEX lazy init" in second.stdout and "APEX lazy init" not in first.stdout
    assert set(re.findall("TYPE (.*)", first.stdout)) == {"torch.float32"}
    assert re.findall("APEX (.*)", first.stdout)[:8] == ["backward", "unscale", "master_params", "step"] * 2
    for name in "model", "amp", "optimizer":
        torch.testing.assert_close(saved[0][name], saved[1][name], rtol=0, atol=0)


def test_torch_amp_unscales_before_it_clips_and_skips_a_step_that_overflows_and_keeps_the_scale(tmp_path):
    norm = "nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()"
    say = f"foreach=True)\n    optimizer.register_step_pre_hook(lambda *_: print('NORM', {norm}))\n"
    overflow = ("scaler.scale(loss)", "scaler.scale(loss * (math.inf if epoch == step == 1 else 1))")
    scale = ("GradScaler(device.type)", "GradScaler(device.type, init_scale=256)")
    edits = ("fused=True)\n", say), overflow, scale, SMALL_MODEL, SAY_TYPE
    start = lambda: train(tmp_path, 1, "--clip-grad", "0.125", script="apex_amp_train")  # noqa: E731
    first, second, *_ = run_and_resume(tmp_path, start, *edits)
    assert set(re.findall("TYPE (.*)", first.stdout)) == {"torch.float16"}
    norms = [float(norm) for norm in re.findall("NORM (.*)", first.stdout)]
    assert norms == [pytest.approx(0.125, rel=2e-3)] * 9  # of ten steps, the first is skipped
    assert re.findall("loss scale (.*)", first.stdout + second.stdout) == ["128"] * 3


def run_on_gpus(arguments, tmp_path, *edits):
    script, *flags = arguments.split()
    folder = copy_script(tmp_path, script, ("if step % 20 == 0:", "if True:"), *edits)
    return run(command(script, *FLAGS, *flags, nproc=GPUS, folder=folder), **ON_GPUS)


def losses(finished):
    assert result(finished)["gpus"] >= 1 and "process group has NOT been destroyed" not in finished.stderr
    return [float(loss) for loss in re.findall(r"step \d+/\d+ loss (\S+)", finished.stdout)]


@needs_gpu
@pytest.mark.parametrize("script", ["dp_train", "ddp_launch_train", "ddp_spawn_train"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 2e-2)])
def test_it_trains_on_gpus_and_compiled_alike(script, precision, tolerance, tmp_path):
    eager = losses(run_on_gpus(f"{script} --precision {precision}", tmp_path))
    if script != "dp_train" or GPUS == 1:  # which compiles for one GPU only
        compiled = losses(run_on_gpus(f"{script} --precision {precision} --compile", tmp_path))
        # The first steps alone: on so small a model, rounding grows a thousandfold in the next ones.
        assert compiled[:2] == pytest.approx(eager[:2], rel=tolerance)


@needs_apex
def test_apexs_own_ddp_and_sync_bn_train_like_pytorchs(tmp_path):
    arguments = "apex_amp_train --backend apex --sync-bn --epochs 1"
    apex = losses(run_on_gpus(
        arguments, tmp_path,
        ("from torch.nn.parallel import DistributedDataParallel as DDP",
         "from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model"),
        ("build_model(args).to(device)", "build_model(args).to(device, memory_format=torch.contiguous_format)"),
        ("nn.SyncBatchNorm.convert_sync_batchnorm(model)", "convert_syncbn_model(model)"),
    ))
    assert apex[:3] == pytest.approx(losses(run_on_gpus(arguments, tmp_path))[:3], rel=2e-2)


@needs_gpu
@pytest.mark.parametrize("level", ["torch", *(pytest.param(f"O{i}", marks=needs_apex) for i in range(4))])
def test_every_level_trains_clips_and_resumes_like_an_uninterrupted_run(level, tmp_path):
    flags = [*FLAGS, "--clip-grad", "1", "--checkpoint", "run.pt"]
    flags += [] if level == "torch" else ["--backend", "apex", "--opt-level", level]
    arguments = command("apex_amp_train", *flags, nproc=GPUS, folder=tmp_path)
    same = ("    train_set, val_set", "    torch.backends.cudnn.deterministic = True\n    train_set, val_set")
    first, _, *saved = run_and_resume(tmp_path, lambda: run(arguments, cwd=tmp_path, **ON_GPUS), same)
    assert result(first)["gpus"] == GPUS
    torch.testing.assert_close(saved[0]["model"], saved[1]["model"], rtol=1e-3, atol=1e-5)


CALL, WRAPPED = "(args, ddp_model, batch", "    ddp_model.broadcast_buffers = False\n"
UNUSUAL = "model.layer1.requires_grad_(False); model.fc.weight.data = model.fc.weight.data.T.contiguous().T"
RIGHT = {
    "the script as it is": [],
    "frozen and transposed weights": [(f"return {RESNET}", f"model = {RESNET}; {UNUSUAL}; return model")],
}
MISTAKES = {
    "trained with model at a tiny rate": [(CALL, "(args, model, batch"), ("else args.lr", "else 1e-10")],
    "moved to the CPU and back": [(WRAPPED, f"{WRAPPED}    model.cpu(); model.to(device)\n")],
    "no_sync": [(WRAPPED, f"{WRAPPED}    ddp_model.require_backward_grad_sync = False\n")],
}
RUNS = ["ddp_launch_train --sync-bn", "ddp_spawn_train", "ddp_launch_train --compile", "apex_amp_train --compile"]
APEX = "apex_amp_train --backend apex --opt-level"
RUNS += [pytest.param(f"{APEX} {level}", marks=needs_apex) for level in ("O1", "O2")]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("arguments", RUNS)
@pytest.mark.parametrize("case", RIGHT | MISTAKES)
def test_on_gpus_different_weights_end_the_run_and_equal_ones_do_not(case, arguments, tmp_path):
    finished = run_on_gpus(f"{arguments} --checkpoint {tmp_path}/run.pt", tmp_path, *(RIGHT | MISTAKES)[case])
    if case in RIGHT:
        assert result(finished)["gpus"] == GPUS
    else:
        assert "after epoch 1, the weights of the processes differ" in finished.stderr + finished.stdout
        assert finished.returncode != 0 and not (tmp_path / "run.pt").exists()
