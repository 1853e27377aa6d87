from pathlib import Path

import pytest
import torch

from training.folder import MAKERS, write_component, write_frame


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder as the stages write it, nothing learned yet."""
    folder = tmp_path_factory.mktemp("demo")
    torch.manual_seed(0)
    write_frame(folder, seed=0)
    for name, make in MAKERS.items():
        write_component(folder, name, make())
    return folder
