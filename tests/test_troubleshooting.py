"""TROUBLESHOOTING.md: causes of weights that differ, and mistakes that raise no error."""

import json

from conftest import SMALL, in_group, in_processes
from editing import SMALL_MODEL, copy_script

CALL, BACKWARD, STEP = "(args, ddp_model, batch", "loss.backward()", "optimizer.step()"
WRAP, WRAPPED = "    # [DDP 5/9]", "    ddp_model.broadcast_buffers = False"
OPTIMIZER, OUTPUTS = "    return torch.optim.SGD(model.parameters()", "outputs.float(), labels)"
SAVE = "            save_checkpoint(args, stateful, epoch, metrics)"
# With a tiny learning rate, sums of absolute weights stay equal up to 3e-7, as some weights grow and some shrink.
TINY_RATE = f"    return torch.optim.AdamW(model.parameters(), 3e-7)\n{OPTIMIZER}"
NO_BIAS = "nn.Sequential(nn.Flatten(), nn.Linear(48, 4096, False), nn.ReLU(), nn.Linear(4096, 10, False))"


def training(*weights):
    """Return an edit that gives weights to the optimizer that have no gradients."""
    frozen = f"[nn.Parameter(weight, requires_grad=False) for weight in [{', '.join(weights)}]]"
    return {OPTIMIZER: f"    return torch.optim.SGD([*model.parameters(), *{frozen}], lr)\n{OPTIMIZER}"}


def frozen(layers):
    return {WRAP: f"    model[{layers}].requires_grad_(False)\n{WRAP}"}


WEIGHTS, OWN_GRADIENT = "model.parameters()", "weight.grad, = torch.autograd.grad(loss, weight, retain_graph=True)"
OWN_SCALE = f"""    args.scale = nn.Parameter(torch.ones(10))
    return torch.optim.SGD([dict(params={WEIGHTS}), dict(params=args.scale)]"""
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
    "a layer that is unfrozen after wrapping": {**frozen(0), WRAPPED: f"{WRAPPED}; model.requires_grad_(True)"},
    "a weight outside of the model": {OPTIMIZER: OWN_SCALE, OUTPUTS: "outputs.float() * args.scale, labels)"},
    "a learning rate of each rank": {STEP: "optimizer.param_groups[0]['lr'] = loss.item() / 50; optimizer.step()"},
    "other ranks that take the else": {SAVE: f"{SAVE}\n        else: optimizer.param_groups[0]['max_lr'] /= 4"},
    "an incomplete last group under no_sync": {
        "optimizer.zero_grad()": """if step % 2:
                optimizer.zero_grad()
            ddp_model.require_backward_grad_sync = step % 2 == 0  # as no_sync() does""",
        STEP: "if step % 2 == 0 or step == steps: optimizer.step()",
    },
}
NOISE = "1 + rank * 1e-7 * torch.randn_like(weight)"  # float32 has a precision of 1.2e-7
EQUAL = {
    "weights of all kinds": training(*KINDS.values()),
    "frozen layers": frozen(0),
    "clipped gradients": {STEP: f"nn.utils.clip_grad_norm_(model.parameters(), 0.1); {STEP}"},
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
    assert len(ends_of_ranks[0]) == len(DIFFERENT | EQUAL)
    for case in DIFFERENT | EQUAL:
        epoch = 2 if "else" in case else 1  # The others differ from the first epoch on.
        expected = f"after epoch {epoch}, the weights of the processes differ: see TROUBLESHOOTING.md"
        saved = epoch == 2
        if case in EQUAL:
            expected, saved = "well", True
        if "NaN" in case:
            expected, saved = "a metric is NaN or infinite: use a smaller --lr and a new --checkpoint", False
        assert [ends[case] for ends in ends_of_ranks] == [expected] * 2, case
        assert (tmp_path / "cases" / case / "run.pt").exists() == saved, case


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


def test_random_numbers_and_other_mistakes_that_raise_no_error(tmp_path):
    in_group(2, tmp_path, NUMBERS + OTHERS)
