"""RECIPES.md: each block runs in one of our scripts, in minimal/ddp.py or in a small program."""

import ast
import itertools
import os
import re
import shutil
import sys
from textwrap import dedent, indent

import pytest
import torch
from conftest import SMALL, in_group, in_processes, result, run, saved_by, train, train_minimal
from editing import FLOAT64, KILLED_IN_EPOCH_2, ROOT, SCRIPTS, SMALL_MODEL, copy_script, edited
from pages import LAUNCH, MINIMAL, after, at, before, block, edits_of, line
from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

import common

PAGE = (ROOT / "RECIPES.md").read_text()


def functions(*codes):
    """Return an edit that adds functions at the end of a script, where they replace those of the same name."""
    return "\nif __name__", "\n".join(["", *codes, "\nif __name__"])


def pieces(name):
    """Return the parts of a block between empty lines."""
    return [piece.rstrip("\n") + "\n" for piece in block(name).split("\n\n")]


def said(code):
    """Return code that stands in a sentence of the page."""
    assert f"`{code}`" in PAGE.replace("\n", " "), code
    return code


# The scripts that a diff fits. Other diffs fit all scripts with DDP.
FITS = {"early stopping": SCRIPTS, "our accumulation": SCRIPTS[1:3], "apex ddp": SCRIPTS[3:]}


def test_each_block_is_tested_each_diff_fits_its_scripts_and_the_index_links_to_each_recipe(tmp_path):
    blocks = re.findall(r"<!-- test: (.*?) -->\n```(\w+)\n", PAGE)
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("*.py"))
    assert len(blocks) == len(dict(blocks)) == PAGE.count("\n```") / 2
    assert all(f'"{name}"' in tests for name, _ in blocks)
    for name in [name for name, language in blocks if language == "diff" and name != "resuming"]:
        for script in FITS.get(name, SCRIPTS[1:]):
            folder = copy_script(tmp_path, script, *edits_of(block(name)))
            compile((folder / f"{script}.py").read_text(), script, "exec")
    titles = re.findall("(?m)^## (.*)", PAGE)
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert sorted(re.findall(r"\(#(.*?)\)", PAGE.split("\n## ")[0])) == sorted(anchors)
    assert set(re.findall(r"\(#(.*?)\)", PAGE)) <= set(anchors)


LOSS_PROGRAM = """
import contextlib
torch.set_default_dtype(torch.float64)
device, mine, class_weights = "cpu", slice(rank, None, world_size), torch.tensor([1.0, 5.0, 0.2, 3.0])
results = {}
for name, case in CASES.items():
    torch.manual_seed(1)
    scope = dict(globals())
    exec(case, scope)
    weights, losses = list(scope["model"].parameters()), [None] * world_size
    if all(weight.grad is None for weight in weights):
        scope["loss"].backward()
    dist.all_gather_object(losses, scope["loss"].item())
    results[name] = torch.cat([weight.grad.flatten() for weight in weights]), losses
if rank == 0:
    torch.save(results, "results.pt")
"""
ROWS = """
model, images, labels = nn.Linear(6, 4), torch.randn(12, 6)[mine], torch.randint(4, (12,))[mine]
ddp_model = DDP(model)
"""
PIXELS = """
model, images, labels = nn.Conv2d(5, 4, 1), torch.randn(12, 5, 2, 3), torch.randint(4, (12, 2, 3))
labels[:2] = labels[torch.rand(labels.shape) < 0.3] = -100
images, labels, ddp_model = images[mine], labels[mine], DDP(model)
"""
WEIGHTED = "loss = nn.functional.cross_entropy(ddp_model(images), labels, class_weights)\n"
SMOOTHED = WEIGHTED.replace("weights)", "weights, label_smoothing=0.1)")
gathered, gathered_views = pieces("gathered")
VIEWS = f"{ROWS}view_1, view_2 = images, images.flip(1)\n"
views = "first, second = ddp_model(torch.cat([view_1, view_2])).chunk(2)\n"
CONTRAST = "loss = -(first @ second.T).log_softmax(1).diagonal().mean()\n"
TEXTS = """
tokens = torch.randint(1, 5, (12,))
x, targets = torch.randn(20, 12, 6), torch.randint(1, 4, (12, 5))
x, targets, tokens = x[:, 4 * rank :], targets[4 * rank :], tokens[4 * rank :]  # other ranks have fewer
if rank < world_size - 1:
    x, targets, tokens = x[:, :4], targets[:4], tokens[:4]
frames, model = torch.full((len(tokens),), 20), nn.Linear(6, 4)
log_probs = DDP(model)(x).log_softmax(2)
"""
CTC = "loss = nn.functional.ctc_loss(log_probs, targets, frames, tokens)\n"
of_texts = said("sum_over_all((losses / tokens).sum())"), said("sum_over_all(losses.new_tensor(len(losses)))")
ctc = CTC.replace("loss =", "losses =").replace("tokens)", 'tokens, reduction="none")') + f"loss = {' / '.join(of_texts)}"
ADVANTAGES = f"{ROWS}advantages = images.square().sum(1)\n"
ordinary = "of_all = advantages\n"
NORMALISE = "advantages = (advantages - of_all.mean()) / (of_all.std() + 1e-8)\n"
POLICY = "loss = -(advantages * ddp_model(images)[:, 0]).mean()\n"
of_all_ranks = f"of_all = {said('gather(advantages)')}\n"
METHODS = f"""
class Model(nn.Linear):
    def {said('forward(self, method, *inputs)')}:
        return {said('getattr(self, method)(*inputs)')}

    def training_loss(self, images):
        return super().forward(images).square().mean()
{ROWS.replace("nn.Linear", "Model")}
"""
BOXES = f"{ROWS}matched = torch.arange(12)[mine] % 2 == 1\ncount = matched.sum()\n"  # rank 0 of 2: none
boxes = "loss = ddp_model(images)[matched].square().sum() / count.clamp(min=1)\n"
of_all_boxes = f"loss = {said('sum_over_all(loss * count.clamp(min=1)) / sum_over_all(count).clamp(min=1)')}"
# Name: what stands before both, the ordinary code for one process, the recipe.
LOSSES = {
    "class weights, gathered": (PIXELS, WEIGHTED, gathered),
    "class weights and smoothing, by sums": (PIXELS, SMOOTHED, block("by sums")),
    "two views": (VIEWS, views + CONTRAST, gathered_views + CONTRAST),
    "CTC": (TEXTS, CTC, ctc),
    "advantages": (ADVANTAGES, ordinary + NORMALISE + POLICY, of_all_ranks + NORMALISE + POLICY),
    "methods": (METHODS, "loss = model.training_loss(images)", f"loss = {said('ddp_model("training_loss", images)')}"),
    "boxes": (BOXES, boxes, boxes + of_all_boxes),
}
LOCAL = ["advantages", "methods"]  # each rank's loss is that of its own images


def test_the_gradient_of_each_loss_is_that_of_one_process(tmp_path):
    runs = {}  # (1 for the ordinary code or 2 for the recipe, number of processes): name: gradient and losses
    for number, nproc in (1, 1), (1, 2), (2, 1), (2, 2), (2, 3):
        cases = {name: case[0] + case[number] for name, case in LOSSES.items()}
        in_group(nproc, tmp_path, f"{block('sum over all')}\nCASES = {cases!r}\n{LOSS_PROGRAM}")
        runs[number, nproc] = torch.load(tmp_path / "results.pt")
    for name in LOSSES:
        expected, [loss] = runs[1, 1][name]
        for nproc in 1, 2, 3:
            gradient, losses = runs[2, nproc][name]
            assert (gradient - expected).norm() < 1e-12 * expected.norm(), (name, nproc)
            assert name in LOCAL or losses == pytest.approx([loss] * nproc, rel=1e-12), (name, nproc)
        wrong, _ = runs[1, 2][name]
        assert (wrong - expected).norm() > 1e-3 * expected.norm(), name  # so the recipe is needed


NET = "nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 10))"
SGD = "    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)\n"
# Edits of minimal/ddp.py: float64, and no BatchNorm.
EXACT = [
    functions("torch.set_default_dtype(torch.float64)\nimport contextlib, glob, itertools, math\n"),
    ("batch_size=512, sampler", "batch_size=12 // world_size, sampler"),
    at(line("model = models"), f"model = {NET}\n"),
    (line("optimizer = "), SGD),  # AdamW would not see a wrong factor
]
LOOP, LOSS, STEP = line("in train_loader", 2), line("loss = nn"), line("optimizer.zero_grad", 3)
SAMPLER, WRAPPED, EPOCHS = line("= DistributedS"), line("= DDP"), line("    for epoch in")
OUR_SAMPLER, OUR_LOADER = line("= DistributedS", text=LAUNCH), line("train_loader = DataL", text=LAUNCH)
NO_ACCURACY = at(line(r"correct \+="), "pass\n")
STEP_OF_LOOP = dedent(LOSS + STEP)

# The labels 0 to 3 are ignored, and the others have different weights.
OURS_LABELLED = after(line(r"tensor.to\(device", text=LAUNCH), "labels = labels.where(labels > 3, -100)\n")
WEIGHTS = "torch.arange(1, 11).double()"
DIFF_OF_WEIGHTS = edits_of(block("weights in our scripts").replace("torch.ones(10, device=device)", WEIGHTS))
OUR_WEIGHTS = [OURS_LABELLED, functions(block("sum over all")), *DIFF_OF_WEIGHTS]
ours_ordinary = OURS_LABELLED, ("outputs.float(), labels)", f"outputs.float(), labels, {WEIGHTS})")

weighted_sampler, use_of_sampler = pieces("weighted sampler")
READ = "lambda epoch: (items[i] for i in torch.randperm(60, generator=torch.Generator().manual_seed(epoch)).tolist())"
OF_STREAM = [
    functions(block("stream")),
    at(SAMPLER, f"items = train_set\ntrain_set = Stream({READ}, 60)\n"),
    ("world_size, sampler=sampler", "world_size, drop_last=True"),
    ("sampler.set_epoch(epoch)", said("train_set.epoch = epoch")),
]

in_parts = f"for images, labels in train_loader:\n{indent(block('accumulation').replace('128', '4'), '    ')}"
OUR_PARTS = [functions("import contextlib"), *edits_of(block("our accumulation").replace("128", "4"))]

# Each unfreezes the first layer in the second epoch.
unfreeze, wrap_again = (piece.replace("conv1", "get_submodule('1')") for piece in pieces("unfreezing"))
unfreeze, wrap_again = unfreeze.replace(">= 2", ">= 1").splitlines(True), wrap_again.replace("== 2", "== 1")
FROZEN = before(WRAPPED, "model[1].requires_grad_(False)\n")
set_epoch = line("set_epoch")
OF_ONE = [at(WRAPPED, "ddp_model = model\n"), after(set_epoch, "model[1].requires_grad_(epoch >= 1)\n")]

wrap, gan = pieces("GAN")
gan = gan.replace("torch.randn(len(images), 64, device=device)", "nn.functional.pad(images.flatten(1), (0, 16))")
two_models = """generator = nn.Sequential(nn.Linear(64, 48), nn.Unflatten(1, (3, 4, 4)))
discriminator = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1))
model = nn.Sequential(generator, discriminator).to(device)
optimizer, optimizer_d = (torch.optim.SGD(part.parameters(), 0.1) for part in model)
"""
OF_GAN = [at(SGD, two_models), at(LOSS + STEP, gan), NO_ACCURACY]


def by_steps(last, *edits):
    """Return edits to train up to a step, from the newest file if there is one, and to save every three steps."""
    load = "\n".join(re.findall(r"(?m)^\+    (.*)", block("resuming").split("...")[0]))
    load = load.replace("epochs_done, settings = 0,", "steps_done, settings = 0,").replace("epochs_done", "steps_done")
    newest = said('max(glob.glob("run-*.pt"))')
    load = edited(
        load,
        ('torch.load("run.pt"', f"torch.load({newest}"),
        ('os.path.exists("run.pt")', 'glob.glob("run-*.pt")'),
        (line("    assert", text=load), ""),
    )
    loop = edited(
        block("every n steps").replace("    ...  # steps 6 and 7\n", ""),
        ("steps = 10 * len(train_loader)", f"steps = {last}"),
        (line(r"\.\.\.  # the", text=block("every n steps")), indent(STEP_OF_LOOP, " " * 12)),
        ("len(batches), 1000)", "len(batches), 3)"),
        ("start + 1000]", "start + 3]"),
        *edits,
    )
    whole = MINIMAL[MINIMAL.index(EPOCHS) : MINIMAL.index(STEP)] + STEP
    return [before(WRAPPED, load + "\n"), at(whole, loop)]


TEXT_DATA = """
def load_data(args):
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (61,), generator=random).tolist()
    items = [(torch.randint(1, 9, (n,), generator=random), n % 10) for n in lengths]
    return items, items

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.conv, self.out = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, words, mask):
        mask = mask[..., None]
        hidden = self.conv((self.words(words) * mask).mT).relu().mT
        return self.out((hidden * mask).sum(1) / mask.sum(1))

def build_model(args):
    return Net().double()
"""
bucket_sampler, collate, lines_of_main = block("buckets").split("\n\ndef collate")[0], *re.findall(
    r"(?s)\n(def collate.*?)\n\n#.*?\n(.*)", block("buckets"))[0]
mask, longest = pieces("padding")
NO_MASK = "mask = torch.ones_like(words)\n"


def of_texts_with(*padding):
    """Return edits of our script that train with texts in buckets, and code that takes care of the padding."""
    head = "words, lengths, labels = batch\n"
    sampler_line, loader_line = lines_of_main.splitlines(True)
    padding = re.sub("(?m)^longest|^dist|^words", r"if training: \g<0>", "".join(padding))
    return [
        (OUR_SAMPLER, sampler_line),
        (OUR_LOADER, loader_line),
        functions(bucket_sampler, collate, TEXT_DATA),
        at(line("images, labels = .*to", 2, LAUNCH), head, padding),
        ("outputs = model(images)", "outputs = model(words, mask)"),
    ]


HUB = """
import torch
from torch import nn

class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, input_ids, labels):
        logits = self.out(self.words(input_ids).cumsum(1).tanh())
        self.logits, self.loss = logits, nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:])
        return self

class AutoTokenizer:
    eos_token = "</s>"
    from_pretrained = classmethod(lambda cls, name: cls())

class AutoModelForCausalLM:
    from_pretrained = classmethod(lambda cls, name: LanguageModel().double())

def DataCollatorForLanguageModeling(tokenizer, mlm):
    assert tokenizer.pad_token == "</s>" and not mlm
    return lambda items: {name: nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], True, value)
                          for name, value in dict(input_ids=0, labels=-100).items()}

LoraConfig = dict
def get_peft_model(model, config):
    model.words.requires_grad_(False)  # the adapter is `out`
    return model
"""
OUR_HUB = [functions(
    block("sum over all"),
    "from hub import *",
    edited(block("hugging face"), ("logits.mT.float()", "logits.mT")),
    TEXT_DATA.split("class Net")[0].replace("(torch.randint(1, 9, (n,), generator=random), n % 10)",
                                            "dict(input_ids=torch.randint(1, 9, (n + 1,), generator=random))"),
    f"{said('MAIN_METRIC = "val_score"')}",
)]
own_loss = ("return sum_over_all(loss) / sum_over_all(tokens) if training else loss, sums", "return model(**batch).loss, sums")

# Name: script, edits for the ordinary code of one process (None: there is none), edits for the recipe.
SAME = {
    "class weights": ("ddp_launch_train", ours_ordinary, OUR_WEIGHTS),
    "weighted sampling": ("minimal", None, [functions(weighted_sampler), at(SAMPLER, use_of_sampler)]),
    "our weighted sampling": ("ddp_launch_train", None, [functions(weighted_sampler), at(OUR_SAMPLER, use_of_sampler)]),
    "IterableDataset": ("minimal", None, OF_STREAM),
    "steps": ("minimal", [], by_steps(10)),
    "parts of batches": ("minimal", [], [at(LOOP + LOSS + STEP, in_parts, "    optimizer.step()\n")]),
    "parts of our batches": ("ddp_launch_train", [], OUR_PARTS),
    "unfreezing": ("minimal", OF_ONE, [at(WRAPPED, unfreeze[0]), after(set_epoch, unfreeze[1])]),
    "wrapping again": ("minimal", OF_ONE, [FROZEN, after(set_epoch, wrap_again)]),
    "GAN": ("minimal", [*OF_GAN, at(WRAPPED, wrap.replace("DDP(", "("))], [*OF_GAN, at(WRAPPED, wrap)]),
    "masks": ("ddp_launch_train", None, of_texts_with(mask)),
    "equal lengths": ("ddp_launch_train", of_texts_with(NO_MASK), of_texts_with(longest, NO_MASK)),
    "Hugging Face": ("ddp_launch_train", [(old, edited(new, own_loss)) for old, new in OUR_HUB], OUR_HUB),
}
# The ordinary code is right on two processes, too:
RIGHT_ON_TWO = ["steps", "parts of batches", "parts of our batches"]


def train_on(nproc, folder, script, edits, epochs=2):
    """Train an edited script from new. Return how the run ended, and its weights (None if it failed)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "hub.py").write_text(HUB)
    if script == "ddp_launch_train":
        copy_script(folder, script, *edits, *FLOAT64)
        finished = train(folder, nproc, "--batch-size", "18")
        return finished, None if finished.returncode else torch.load(folder / "run.pt")["model"]
    finished = train_minimal(nproc, folder, *EXACT, *edits, epochs=epochs, images=60)
    return finished, None if finished.returncode else torch.load(folder / "model.pt")


def equal(weights, expected):
    """Return whether weights are the same but for rounding, in float64."""
    return all(torch.allclose(weights[name], expected[name], rtol=1e-12, atol=1e-12) for name in expected)


@pytest.mark.parametrize("name", SAME)
def test_1_2_and_3_processes_end_with_the_same_weights(name, tmp_path):
    script, ordinary, recipe = SAME[name]
    _, expected = train_on(1, tmp_path / "run", script, recipe if ordinary is None else ordinary)
    for nproc in (2, 3) if ordinary is None else (1, 2, 3):
        assert equal(train_on(nproc, tmp_path / "run", script, recipe)[1], expected), nproc
    if ordinary is not None and name not in RIGHT_ON_TWO:
        _, weights = train_on(2, tmp_path / "run", script, ordinary)
        assert weights is None or not equal(weights, expected)  # so the recipe is needed
