"""GPT-2 or Llama 3? A training is of the one whose program was started, train_gpt2.py or
dev/llama3/train_llama3.py; a program that takes a checkpoint of either asks its header here."""
import os

from dev.common.files import checked_header
from dev.features.base import GPT2
from dev.features.checkpoints.newest import newest_checkpoint
from dev.llama3.train_llama3 import Llama3


def checkpoint_of(path):
    """A checkpoint's path, or, of a run's folder, that of its newest one."""
    return os.path.isdir(path) and newest_checkpoint(path) or path


def find_architecture(path):
    """(the class of a checkpoint's model, its config). Raises UserError."""
    architectures = {architecture.Config.FILE: architecture for architecture in (GPT2, Llama3)}
    magic = checked_header(path, *architectures)[0]
    [architecture] = [architecture for kind, architecture in architectures.items()
                      if kind.magic == magic]
    return architecture, architecture.Config.from_file(path)
