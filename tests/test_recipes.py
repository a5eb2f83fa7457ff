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
    assert all(re.search(f"""["']{name}["']""", tests) for name, _ in blocks)
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
ddp_model = DDP(model)
log_probs = ddp_model(x).log_softmax(2)
"""
CTC = "loss = nn.functional.ctc_loss(log_probs, targets, frames, tokens)\n"
of_texts = said("sum_over_all((losses / tokens).sum())"), said("sum_over_all(losses.new_tensor(len(losses)))")
ctc = CTC.replace("loss =", "losses =").replace("tokens)", 'tokens, reduction="none")') + f"loss = {' / '.join(of_texts)}"
ADVANTAGES = f"{ROWS}advantages = images.square().sum(1)\n"
ordinary = "of_all = advantages\n"
NORMALISE = "advantages = (advantages - of_all.mean()) / (of_all.std() + 1e-8)\n"
POLICY = "loss = -(advantages * ddp_model(images)[:, 0]).mean()\n"
of_all_ranks = f"of_all = {said('gather(advantages)')}\n"
GROUPS = f"{PIXELS}parts = list(zip(images.split(1), labels.split(1)))\n"
of_weights = "class_weights[labels.clamp(min=0)] * (labels != -100)"
groups = f"""weights = {of_weights}
total = {said('sum_over_all(weights.sum())')}
for number, (images, labels) in enumerate(parts, 1):
    with contextlib.nullcontext() if number == len(parts) else ddp_model.no_sync():
        loss = nn.functional.cross_entropy(ddp_model(images), labels, class_weights, reduction="sum")
        (sum_over_all(loss) / total).backward()
"""
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
    "two sums of a batch in parts": (GROUPS, WEIGHTED, groups),
    "two views": (VIEWS, views + CONTRAST, gathered_views + CONTRAST),
    "CTC": (TEXTS, CTC, ctc),
    "advantages": (ADVANTAGES, ordinary + NORMALISE + POLICY, of_all_ranks + NORMALISE + POLICY),
    "methods": (METHODS, "loss = model.training_loss(images)", f"loss = {said('ddp_model("training_loss", images)')}"),
    "boxes": (BOXES, boxes, boxes + of_all_boxes),
}
LOCAL = ["advantages", "methods", "two sums of a batch in parts"]  # each rank's loss is that of its own images


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
DIFF_OF_WEIGHTS = edits_of(block("our weights").replace("torch.ones(10, device=device)", WEIGHTS))
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
for update in "optimizer_d", "optimizer":
    loss = "loss_d" if update == "optimizer_d" else "loss"
    of_update = f"{update}.zero_grad()\n{loss}.backward()\n{update}.step()\n"
    gan = edited(gan, (line(rf"\.\.\.  # {update}:", text=gan), of_update))
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
    texts = [torch.randint(1, 9, (n,), generator=random) for n in torch.randint(2, 40, (61,), generator=random)]
    items = [({}) for words in texts]
    return items, items
"""
NET_OF_TEXTS = """
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
    head = "words, lengths, labels = batch\nimages = torch.zeros(1)  # not used\n"
    sampler_line, loader_line = lines_of_main.splitlines(True)
    padding = re.sub("(?m)^longest|^dist|^words", r"if training: \g<0>", "".join(padding))
    return [
        (OUR_SAMPLER, sampler_line),
        (OUR_LOADER, loader_line),
        functions(bucket_sampler, collate, TEXT_DATA.format("words, len(words) % 10"), NET_OF_TEXTS),
        at(line(r"tensor.to\(device", text=LAUNCH), head, padding),
        ("outputs = model(images)", "outputs = model(words, mask)"),
    ]


# The interface of transformers and peft that the page uses. (With these libraries, it was tried by hand.)
HUB = """
from types import SimpleNamespace
import torch
from torch import nn

class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, input_ids, labels):
        logits = self.out(self.words(input_ids).cumsum(1).tanh())
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:]))

class AutoTokenizer:
    eos_token = "</s>"
    from_pretrained = classmethod(lambda cls, name: cls())

class AutoModelForCausalLM:
    from_pretrained = classmethod(lambda cls, name: LanguageModel().double())

def DataCollatorForLanguageModeling(tokenizer, mlm):
    assert tokenizer.pad_token == "</s>" and not mlm
    pad = lambda items, value: nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], True, value)
    return lambda items: dict(input_ids=pad(items, 0), labels=pad(items, -100))

def get_peft_model(model, config):
    model.words.requires_grad_(False)  # `out` is the adapter
    return model

LoraConfig = dict
"""
hub = edited(block("hugging face"), ("logits.mT.float()", "logits.mT"))
own_loss = ("sum_over_all(loss) / sum_over_all(tokens) if training else loss", "model(**batch).loss")
OF_HUB = ["from hub import *", block("sum over all"), TEXT_DATA.format("dict(input_ids=words)")]

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
    "Hugging Face": ("ddp_launch_train", [functions(*OF_HUB, edited(hub, own_loss))], [functions(*OF_HUB, hub)]),
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


def test_a_resumed_run_is_that_of_an_uninterrupted_one_and_other_settings_end_it(tmp_path):
    dropout, resume = ("nn.Tanh()", "nn.Dropout(0.1)"), edits_of(block("resuming"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, epochs in (whole, 3), (parts, 2), (parts, 3):
        assert train_minimal(2, folder, *resume, *EXACT, dropout, epochs=epochs, images=60).returncode == 0
    expected, resumed = (torch.load(folder / "run.pt") for folder in (whole, parts))
    assert resumed["epochs_done"] == 3 and equal(resumed["model"], expected["model"])
    finished = train_minimal(3, parts, *resume, *EXACT, images=60)
    assert finished.returncode != 0 and "run.pt has {'batch_size': 80," in finished.stdout


def test_a_loop_that_saves_every_3_steps_resumes_within_an_epoch_also_with_workers_and_keeps_3_files(tmp_path):
    def weights_of(folder, last):
        dropout = ("nn.Tanh()", "nn.Dropout(0.1)")
        workers = ("num_workers=8", "num_workers=2, multiprocessing_context='fork'")
        assert train_minimal(2, folder, *EXACT, dropout, *by_steps(last, workers), images=60).returncode == 0
        return torch.load(max(folder.glob("run-*.pt")))["model"]

    expected = weights_of(tmp_path / "two", 14)
    assert sorted(path.name for path in tmp_path.glob("two/run-*")) == [f"run-{n:08}.pt" for n in (10, 13, 14)]
    assert not equal(weights_of(tmp_path / "resumed", 8), expected)
    for _ in "resumed", "finished":
        assert equal(weights_of(tmp_path / "resumed", 14), expected)


def test_the_metrics_are_those_of_all_images_on_1_2_and_3_processes(tmp_path):
    matrix, f1 = said("confusion=confusion_of(outputs, labels)"), said('f1=f1_of(sums["confusion"])')
    f1_edits = [("images=known.sum())", f"images=known.sum(), {matrix})"), ('["images"])', f'["images"], {f1})')]
    auroc = "from torchmetrics.functional.classification import multiclass_auroc\n"
    with_f1 = [*OUR_WEIGHTS, *f1_edits, functions(block("confusion")), *FLOAT64]
    with_auc = [functions(auroc, block("gather rows")), (FLOAT64[0][0], FLOAT64[0][1].removesuffix(".double()"))]
    with_f1 = copy_script(tmp_path / "f1", "ddp_launch_train", *with_f1)
    with_auc = copy_script(tmp_path / "auc", "ddp_launch_train", *with_auc)
    images, labels = map(torch.stack, zip(*((image, torch.tensor(label)) for image, label in common.load_cifar10(None, 61)[1])))
    images, known = common.prepare(images, 4), labels > 3
    model = eval(FLOAT64[0][1], vars(torch))
    for folder, nproc in itertools.product((with_f1, with_auc), (1, 2, 3)):
        metrics = result(train(folder, nproc, "--epochs", "1"))
        model.load_state_dict(torch.load(folder / "run.pt")["model"])
        (folder / "run.pt").unlink()
        if folder == with_auc:
            scores = model.float()(images)
            expected = dict(accuracy=(scores.argmax(1) == labels).double().mean(), auc=multiclass_auroc(scores, labels, 10))
        else:
            scores, targets = model.double()(images.double())[known], labels[known]
            loss = torch.nn.functional.cross_entropy(scores, targets, torch.arange(1, 11).double())
            f1 = multiclass_f1_score(scores, targets, 10, average="macro")
            expected = dict(loss=loss, accuracy=(scores.argmax(1) == targets).double().mean(), f1=f1)
        for name, value in expected.items():
            assert metrics[f"val_{name}"] == pytest.approx(value.item(), rel=1e-6), (name, nproc)


STAND_INS = """
wandb_id = None
class wandb:
    init = staticmethod(lambda **settings: print("INIT"))
    log = staticmethod(lambda values, step: print("LOG", values, step))

def tqdm(items, disable):
    print("" if disable else "BAR")
    return items
"""


def test_rank_0_alone_logs_the_loss_of_all_ranks(tmp_path):
    init, loop, log = pieces("logging")
    loop = edited(loop, (line(r"\.\.\.  #", text=loop), indent(STEP_OF_LOOP, "    ")))
    edits = [functions(STAND_INS), before(EPOCHS, init), at(LOOP + LOSS + STEP, loop), before(line("if rank == 0"), log)]
    losses = []
    for nproc in 1, 2, 3:
        finished, _ = train_on(nproc, tmp_path / "run", "minimal", edits)
        counts = [len(re.findall(f"(?m)^{word}", finished.stdout)) for word in ("INIT", "BAR", "LOG", "epoch")]
        assert finished.returncode == 0 and counts == [1, 2, 2, 2]
        losses += [ast.literal_eval(values)["loss"] for values in re.findall("LOG ({.*}) 1", finished.stdout)]
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_all_processes_stop_early_in_one_epoch_also_when_the_command_is_repeated(tmp_path):
    copy_script(tmp_path, "ddp_launch_train", *edits_of(block("early stopping")), *FLOAT64)
    first, again = (train(tmp_path, 2, "--lr", "1e-9", "--epochs", "9") for _ in range(2))
    assert first.stdout.count(" train_loss ") == 6 and " train_loss " not in again.stdout
    assert result(first) == result(again)


def test_buckets_have_similar_lengths_and_all_ranks_together_draw_each_item_at_most_once():
    scope, orders = vars(torch.utils.data) | dict(torch=torch), []
    exec(edited(bucket_sampler, ("lengths, seed", "lengths, num_replicas=3, rank=rank, seed")), scope)
    lengths = torch.randint(1, 500, (211,)).tolist()
    for epoch in 0, 1:
        batches = []
        for scope["rank"] in range(3):
            sampler = scope["Buckets"](lengths, 24, 21)
            sampler.set_epoch(epoch)
            batches.append([*sampler])
            assert len(batches[-1]) == len(sampler) == 8 and {len(batch) for batch in batches[-1]} == {8}
        orders.append([sum(parts, []) for parts in zip(*batches)])
        items = sum(orders[-1], [])
        assert len(items) == len(set(items)) == 192
        spans = sorted([min(of_batch), max(of_batch)] for of_batch in ([lengths[i] for i in b] for b in orders[-1]))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert orders[0] != orders[1]


def test_classes_are_drawn_equally_often():
    labels = torch.tensor([0] * 900 + [1] * 100 + [2])
    scope = vars(torch.utils.data) | dict(torch=torch, train_set=[(None, label) for label in labels])
    exec(edited(block("weighted sampler"), ("seed=21", "1, 0, seed=21")), scope)  # of one process
    first = [*scope["sampler"]]
    scope["sampler"].set_epoch(1)
    assert all(270 < count < 400 for count in labels[first].bincount()) and first != [*scope["sampler"]]


def test_a_stream_with_workers_yields_no_item_twice_and_equally_many_on_all_ranks(tmp_path):
    program = f"import itertools\nfrom torch.utils.data import DataLoader\n{block('stream')}" + """
train_set = Stream(lambda epoch: iter(range(100 * epoch, 100 * epoch + 71)), 71)
loader = DataLoader(train_set, 6, drop_last=True, num_workers=2, multiprocessing_context="fork")
for epoch in 1, 2:
    train_set.epoch = epoch
    print(f"{[batch.tolist() for batch in loader]}\\n", end="")
"""
    ranks = [ast.literal_eval(batches) for batches in in_group(2, tmp_path, program).splitlines()]
    items = [item for batches in ranks for batch in batches for item in batch]
    assert [len(batches) for batches in ranks] == [4] * 4  # of 71: each of four workers has two batches of six
    assert len(set(items)) == len(items) == 96


def test_ema_and_a_schedule_per_epoch_resume_exactly_and_the_best_weights_give_the_best_metrics(tmp_path):
    plateau = "def build_scheduler(args, optimizer, steps):\n    return torch.optim.lr_scheduler."
    plateau += said('ReduceLROnPlateau(optimizer, "max")')
    make, update, buffers = (piece.replace("0.999", "0.9") for piece in pieces("EMA"))
    buffers = buffers.replace("  # before step 6; then validate ema.module, and save it as model.pt", "")
    edits = [
        ("            scheduler.step()\n", update.replace("ema", "            ema", 1)),
        after(line("improved =", text=LAUNCH), f"scheduler.step({said('epoch_metrics[MAIN_METRIC]')})\n"),
        before(line("for buffer in", text=LAUNCH), buffers, "print('EMA', [*ema.state_dict().values()], force=True)\n"),
        before(line("stateful = ", text=LAUNCH), make),
        after(line("stateful = ", text=LAUNCH), f"{said('stateful["ema"] = ema')}\n"),
        ("validate(args, model, val", f"validate(args, {said('ema.module')}, val"),
        (said('states["model"]') + ",", said('stateful["ema"].module.state_dict()') + ","),
        functions("from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn", plateau),
        SMALL_MODEL,
    ]
    folder, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finished = train(copy_script(folder, "ddp_launch_train", *edits), 2, "--epochs", "3")
    copy_script(killed, "ddp_launch_train", *edits, KILLED_IN_EPOCH_2)
    assert train(killed, 2, "--epochs", "3").returncode != 0
    resumed = train(copy_script(killed, "ddp_launch_train", *edits), 2, "--epochs", "3")
    assert ": 1 epochs are done" in resumed.stdout
    assert result(resumed) and saved_by(killed) == saved_by(folder)

    lines = sorted(re.findall(r"EMA \[.*?\)\]", finished.stdout, re.S))
    assert len(lines) == 6 and lines[::2] == lines[1::2] and len(set(lines)) == 3  # of 3 epochs, on 2 ranks
    state = torch.load(folder / "run.pt")
    assert state["ema"]["n_averaged"] == state["flags"]["steps"] * 3
    assert state["scheduler"]["best"] == result(finished)["best"]
    assert not torch.equal(state["ema"]["module.1.running_mean"], state["model"]["1.running_mean"])

    infer = f"""
images, labels = zip(*script.load_data(args)[1])
import common
images = torch.stack(images)
with torch.no_grad():
    classes = {said("model(common.prepare(images.to(device), args.image_size, args.pretrained))")}.argmax(1)
print((classes == torch.tensor(labels)).double().mean().item())
"""
    (folder / "evaluate.py").write_text(block("evaluation") + infer)
    evaluated, accuracy = in_processes(0, folder, "evaluate.py").stdout.splitlines()
    best = result(finished)["best"]
    assert ast.literal_eval(evaluated)["accuracy"] == pytest.approx(best) and float(accuracy) == pytest.approx(best)


def test_torchrun_writes_a_log_for_each_rank_and_restarts_a_run_that_was_killed(tmp_path):
    uninterrupted = copy_script(tmp_path / "uninterrupted", "ddp_launch_train", SMALL_MODEL)
    assert result(train(uninterrupted, 2))
    once = "if rank == 1 and epoch == step == 2 and not os.path.exists('killed'):\n"
    kill = "    open('killed', 'w').close(), os.kill(os.getpid(), 9)\n"
    kill = after(line("    scheduler.step", text=LAUNCH), once, kill)
    folder = copy_script(tmp_path / "killed", "ddp_launch_train", SMALL_MODEL, kill)
    command = " ".join([block("restarts").strip().replace("per-node=gpu", "per-node=2"), *SMALL])
    finished = run(["bash", "-c", command], cwd=folder, PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert ": 0 epochs are done" in finished.stdout and ": 1 epochs are done" in finished.stdout
    for attempt, rank in itertools.product((0, 1), (0, 1)):
        [log] = folder.glob(f"logs/*/attempt_{attempt}/{rank}/stdout.log")
        assert f"rank {rank}: process" in log.read_text()
    assert finished.returncode == 0 and saved_by(folder) == saved_by(uninterrupted)
