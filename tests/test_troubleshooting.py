"""TROUBLESHOOTING.md: answers to common questions, causes of weights that differ, mistakes that raise no error."""

import json

import torch
from conftest import SMALL, in_group, in_processes, train
from editing import FLOAT64, SMALL_MODEL, copy_script
from pages import block

# Edits of ddp_launch_train.py: what is replaced, and by what.
CALL, BACKWARD, STEP = "(args, ddp_model, batch", "loss.backward()", "optimizer.step()"
WRAP, WRAPPED, EPOCH = "    # [DDP 4/7]", "    ddp_model.broadcast_buffers = False", "        ddp_model.train()"
SAVE = "            save_checkpoint(args.checkpoint, flags, stateful, epoch, metrics, improved)"
WEIGHTS, OPTIMIZER = "model.parameters()", "    return torch.optim.SGD(model.parameters()"
# With a tiny learning rate, sums of absolute weights stay equal up to 3e-7, as some weights grow and some shrink.
TINY_RATE = f"    return torch.optim.AdamW({WEIGHTS}, 3e-7)\n{OPTIMIZER}"
NO_BIAS = "nn.Sequential(nn.Flatten(), nn.Linear(48, 4096, False), nn.ReLU(), nn.Linear(4096, 10, False))"
OWN_GRADIENT = "weight.grad, = torch.autograd.grad(loss, weight, retain_graph=True)"
OWN_SCALE = f"""    args.scale = nn.Parameter(torch.ones(10))
    return torch.optim.SGD([dict(params={WEIGHTS}), dict(params=args.scale)]"""
NOISE = "1 + rank * 1e-7 * torch.randn_like(weight)"  # float32 has a precision of 1.2e-7


def training(*weights):
    """Return an edit that gives weights to the optimizer that have no gradients."""
    frozen = f"[nn.Parameter(weight, requires_grad=False) for weight in [{', '.join(weights)}]]"
    return {OPTIMIZER: f"    return torch.optim.SGD([*{WEIGHTS}, *{frozen}], lr)\n{OPTIMIZER}"}


def frozen(layers):
    return {WRAP: f"    model[{layers}].requires_grad_(False)\n{WRAP}"}


def unfreezing(code="pass"):
    """Return edits that unfreeze a layer in the second epoch. Fused SGD needs all gradients in its first step."""
    return {EPOCH: f"        model[0].requires_grad_(epoch > 1); {code}\n{EPOCH}", ", fused=True": ""}


def accumulation(forward="step % 2 == 0", step="step % 2 == 0"):
    """Return edits that average gradients in each second step. `forward`: where no_sync() does not hold."""
    zero, average = (
        "            optimizer.zero_grad()",
        "ddp_model.require_backward_grad_sync",
    )  # as no_sync() does
    zero_and_forward = f"            if step % 2: optimizer.zero_grad()\n            {average} = {forward}"
    return {zero: zero_and_forward, BACKWARD: f"{average} = step % 2 == 0; {BACKWARD}", STEP: f"if {step}: {STEP}"}


KINDS = {
    "zeros": "torch.zeros(3)",
    "complex": "torch.randn(3, dtype=torch.complex64)",
    "uint8": "torch.arange(3, dtype=torch.uint8)",
    "float16": "torch.randn(3).half()",
    "transposed": "torch.randn(3, 4).T",
}
DIFFERENT = {
    **{f"{kind} weights": training(f"{weight} + dist.get_rank()") for kind, weight in KINDS.items()},
    "imaginary weights": training("torch.randn(3) * 1j * dist.get_rank()"),
    "a tiny learning rate": {SMALL_MODEL[1]: NO_BIAS, CALL: "(args, model, batch", OPTIMIZER: TINY_RATE},
    "training with model": {CALL: "(args, model, batch"},
    "training the last layer alone with model": {CALL: "(args, model, batch", **frozen(":4")},
    "DDP(model)(images) in the loop": {CALL: "(args, DDP(model), batch"},
    "a method other than forward": {CALL: "(args, lambda images: ddp_model.module.forward(images), batch"},
    "two backward calls": {BACKWARD: "loss.backward(retain_graph=True); loss.backward()"},
    "gradients from torch.autograd.grad": {BACKWARD: f"for weight in {WEIGHTS}: {OWN_GRADIENT}"},
    "a model that is converted and converted back": {WRAPPED: f"{WRAPPED}; model.double(); model.float()"},
    "a layer that is unfrozen after wrapping": {**frozen(0), **unfreezing()},
    "a weight outside of the model": {OPTIMIZER: OWN_SCALE, "outputs.float(),": "outputs.float() * args.scale,"},
    "a learning rate of each rank": {STEP: "optimizer.param_groups[0]['lr'] = loss.item() / 50; optimizer.step()"},
    "other ranks that take the else": {SAVE: f"{SAVE}\n        else: optimizer.param_groups[0]['max_lr'] /= 4"},
    "noise of each rank": {STEP: f"{STEP}; [weight.data.add_(torch.randn_like(weight)) for weight in {WEIGHTS}]"},
    "an incomplete last group under no_sync": accumulation(step="step % 2 == 0 or step == steps"),
    "a last forward pass under no_sync": accumulation(forward="False"),
}
EQUAL = {
    "weights of all kinds": training(*KINDS.values()),
    "frozen layers": frozen(0),
    "unfreezing and wrapping again": {**frozen(0), **unfreezing("del ddp_model; ddp_model = DDP(model)")},
    "unfreezing": {"DDP(model)  #": "DDP(model, find_unused_parameters=True)  #", **unfreezing()},
    "all forward passes outside of no_sync": accumulation(forward="True"),
    "GPUs that round differently": {STEP: f"{STEP}; [weight.data.mul_({NOISE}) for weight in {WEIGHTS}]"},
    "weights that are NaN": {BACKWARD: "(loss * math.nan).backward()"},
}

PROGRAM = f"""
import json, os, runpy, sys
import torch.distributed as dist
dist.init_process_group("gloo")
end_group, ends = dist.destroy_process_group, {{}}
dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None  # one group for all cases
for case in sorted(os.listdir("cases")):
    sys.argv = ["ddp_launch_train.py", *{SMALL}, "--checkpoint", f"cases/{{case}}/run.pt"]
    try:
        runpy.run_path(f"cases/{{case}}/ddp_launch_train.py", run_name="__main__")
        ends[case] = "well"
    except SystemExit as end:
        ends[case] = str(end)
json.dump(ends, open(f"ends{{os.environ['RANK']}}.json", "w"))
end_group()
"""


# Each case replaces lines of ddp_launch_train.py. Two processes train all cases, one after the other.
def test_different_weights_end_the_run_on_all_ranks_and_are_not_saved_and_equal_ones_do_not_end_it(tmp_path):
    for case, edits in (DIFFERENT | EQUAL).items():
        copy_script(tmp_path / "cases" / case, "ddp_launch_train", SMALL_MODEL, *edits.items())
    (tmp_path / "program.py").write_text(PROGRAM)
    assert in_processes(2, copy_script(tmp_path, "dp_train"), "program.py").returncode == 0
    ends_of_ranks = [json.loads((tmp_path / f"ends{rank}.json").read_text()) for rank in (0, 1)]
    for case in DIFFERENT | EQUAL:
        epoch = 2 if "else" in case or "unfrozen" in case else 1  # the first after which they differ
        expected, saved = f"after epoch {epoch}, the weights of the processes differ: ", epoch == 2
        if case in EQUAL:
            expected, saved = "well", True
        if "NaN" in case:
            expected, saved = "train_loss is nan: --lr is too large, or a process has divided by ", False
        assert all(ends[case].startswith(expected) for ends in ends_of_ranks), (case, ends_of_ranks)
        assert (tmp_path / "cases" / case / "run.pt").exists() == saved, case


def test_a_run_of_two_processes_resumes_on_one_and_three_if_the_batch_size_is_the_same(tmp_path):
    end = "        if epoch == epochs_done + 1:"
    stop = (end, f"        if os.environ.get('STOP_AFTER') == str(epoch): break\n{end}")
    for nproc in 2, 1, 3:  # after one epoch of two processes
        folder = copy_script(tmp_path / str(nproc), "ddp_launch_train", *FLOAT64, stop)
        train(folder, 2, STOP_AFTER="1")
        assert ": 1 epochs are done" in train(folder, nproc).stdout
    models = [torch.load(tmp_path / str(nproc) / "run.pt", weights_only=True)["model"] for nproc in (2, 1, 3)]
    torch.testing.assert_close(models[1:], [models[0]] * 2, rtol=1e-12, atol=1e-12)
    assert "run.pt has batch_size=12: use the same flags" in train(folder, 1, "--batch-size", "24").stdout


NUMBERS = """
import random
import numpy as np
class Noise(list):
    def __getitem__(self, index):
        return super().__getitem__(index)()
draws = dict(numpy=np.random.rand, random=random.random, torch=lambda: torch.rand(1).item())
draws["own"] = np.random.default_rng(21).random

def different(name, **options):  # returns how many of the 16 numbers that both ranks draw are different
    options["multiprocessing_context"], of_all = "fork" if options else None, [None] * world_size
    dist.all_gather_object(of_all, list(torch.utils.data.DataLoader(Noise([draws[name]] * 8), None, **options)))
    return len(set(sum(of_all, [])))
random.seed(21), np.random.seed(21), torch.manual_seed(21 + rank)
assert [different(name) for name in ("numpy", "random", "own", "torch")] == [8, 8, 8, 16]
random.seed(21 + rank), np.random.seed(21 + rank)
assert [different(name) for name in ("numpy", "random")] == [16, 16]
draws["own"] = lambda: np.random.default_rng(torch.randint(2**31, ()).item()).random()
assert different("own") == 16
two, generator = dict(num_workers=2), torch.Generator().manual_seed(21)
assert different("torch", **two) == 16 and different("torch", generator=generator, **two) == 8
for seed, number in (int, 8), (lambda _: torch.randint(2**31, ()).item(), 16):
    seed_numpy = lambda worker: np.random.seed(seed(worker))
    assert different("numpy", worker_init_fn=seed_numpy, **two) == number
"""
OTHERS = """
import itertools
from torchmetrics.classification import BinaryAUROC
from torch.utils.data import DataLoader
class Stream(torch.utils.data.IterableDataset):
    __iter__ = lambda self: iter(range(12))
class BatchNormAct(nn.BatchNorm1d):
    forward = lambda self, images: super(BatchNormAct, self).forward(images).relu()
assert list(DataLoader(Stream(), None)) == [*range(12)]  # on each rank
drawn = [*itertools.islice(itertools.cycle(DataLoader(range(12), shuffle=True)), 24)]
assert drawn[:12] == drawn[12:]
ddp_model, images = DDP(nn.Linear(6, 1, False)), torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
ddp_model(torch.ones(6, 6)).sum().backward()
assert (ddp_model.module.weight.grad == 6).all()  # with one process: 12
assert not torch.allclose(nn.BatchNorm1d(6)(images[rank::2]), nn.BatchNorm1d(6)(images)[rank::2], rtol=0.01)
layer = BatchNormAct(6).eval()
assert layer(images).min() >= 0 > nn.SyncBatchNorm.convert_sync_batchnorm(layer)(images).min()
metric, labels = BinaryAUROC(), images[:, 0] > images[:, 1]
metric.update(images[rank::2, 0].sigmoid(), labels[rank::2].long())
assert metric.compute() == BinaryAUROC(sync_on_compute=False)(images[:, 0].sigmoid(), labels.long())
"""
ANSWERS = f"""
from filelock import FileLock
prepare_data = lambda: open("prepared", "x")  # fails if a second rank calls it
{block("prepare")}
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
alone, model = nn.Linear(6, 1), nn.Linear(6, 1)
ddp_model = DDP(model)
alone.load_state_dict(model.state_dict())
alone(images).square().mean().backward()
ddp_model(images[rank::2]).square().mean().backward()
torch.testing.assert_close(*(nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (alone, model)))
ddp_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
with ddp_model.join():
    for _ in range(2 + rank):  # rank 1's last gradient is divided by 2 all the same
        model.zero_grad()
        ddp_model(images).sum().backward()
torch.testing.assert_close(model.weight.grad[0], images.sum(0) / (1 + rank), rtol=0.01, atol=0.1)
"""


def test_random_numbers_other_mistakes_that_raise_no_error_and_common_answers(tmp_path):
    in_group(2, tmp_path, NUMBERS + OTHERS + ANSWERS)
