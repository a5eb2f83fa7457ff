"""Fine-tune BERT to classify texts, with all GPUs.

pip install transformers
torchrun --standalone --nproc-per-node=gpu minimal/text_classifier.py

Each line of train.tsv and val.tsv is a label (0 or 1), a tab, and a text. The steps are those
of ddp.py; what differs is the model and the data.
"""

import os
from pathlib import Path

import checks  # checks.py, beside this file
import torch
import torch.distributed as dist
from filelock import FileLock  # installed with PyTorch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)


def load_texts(file, tokenizer):
    """Return a list of dicts, which have the tokens of a text and its label."""
    items = [line.split("\t", 1) for line in Path(file).read_text().split("\n") if line]
    return [dict(tokenizer(text, truncation=True), labels=int(label)) for label, text in items]


def main():
    # 1. torchrun starts this script once per GPU and tells each process which one it is.
    rank = int(os.environ["RANK"])  # index of this process among all
    local_rank = int(os.environ["LOCAL_RANK"])  # index on its machine
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes

    # 2. Each process uses its own GPU and connects to the others.
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    torch.manual_seed(21)  # the same new weights, of the classification layer, on all ranks
    name = "bert-base-uncased"
    with FileLock("hub.lock"):  # one process downloads while the others wait
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    train_set, val_set = load_texts("train.tsv", tokenizer), load_texts("val.tsv", tokenizer)
    collate = DataCollatorWithPadding(tokenizer)  # pads to the longest text of the batch

    # 3. Each rank trains on its own share, and all together use about 32 texts per step.
    sampler = DistributedSampler(train_set, seed=21, drop_last=True)
    batch_size = 32 // world_size
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, collate_fn=collate)
    val_share = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_share, batch_size, collate_fn=collate)

    # 4. Wrap the model.
    ddp_model = DDP(model)
    ddp_model.broadcast_buffers = False  # the model's buffers never change
    torch.manual_seed(21 + rank)  # dropout should differ between ranks

    for epoch in range(3):
        sampler.set_epoch(epoch)  # 5. Shuffle differently in each epoch.
        model.train()
        for batch in train_loader:
            loss = ddp_model(**batch.to(device)).loss  # a mean over texts: DDP may average it
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        checks.same_weights(optimizer)  # ends the run if the weights of the ranks differ

        # 6. Each rank validates its share, with `model`.
        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for batch in val_loader:
                batch = batch.to(device)
                correct += (model(**batch).logits.argmax(1) == batch["labels"]).sum()
        dist.all_reduce(correct)  # the sum over all processes

        # 7. Only rank 0 prints and saves.
        if rank == 0:
            print(f"epoch {epoch} accuracy {correct.item() / len(val_set):.4f}")
            model.save_pretrained("classifier")
            tokenizer.save_pretrained("classifier")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
