"""Record what the port must compute, too: one_gpu.py with a few changes, for CHECKS.md."""

import checks  # checks.py, beside this file
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


def main():
    device = torch.device("cuda")
    torch.manual_seed(21)
    torch.set_default_dtype(torch.float64)  # because rounding may hide small mistakes
    to_tensor = transforms.ToTensor()
    train_set = datasets.CIFAR10("data", train=True, download=True, transform=to_tensor)
    val_set = datasets.CIFAR10("data", train=False, transform=to_tensor)
    train_set = Subset(train_set, range(60))
    val_set = Subset(val_set, range(101))  # which ranks cannot share equally
    train_loader = DataLoader(train_set, batch_size=12)
    val_loader = DataLoader(val_set, batch_size=512)

    model = models.resnet50(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()  # both for small images
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(2):
        model.eval()  # no dropout; BatchNorm uses its stored statistics, not those of the batch
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            checks.same_as_before("loss", loss)
            optimizer.step()

        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        checks.same_as_before("correct", correct)
        print(f"epoch {epoch} accuracy {correct.item() / len(val_set):.4f}")


if __name__ == "__main__":
    main()
