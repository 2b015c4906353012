"""Data sets, partitions and augmented views."""

from oneround.data.datasets import Loader, datasets, load_dataset
from oneround.data.images import Dataset, Images, dataset_from_arrays
from oneround.data.own import own_images
from oneround.data.partition import Partition, Split, partitions

__all__ = [
    "Dataset",
    "Images",
    "Loader",
    "Partition",
    "Split",
    "dataset_from_arrays",
    "datasets",
    "load_dataset",
    "own_images",
    "partitions",
]
