"""The deploy files that lie in the images."""

from pathlib import Path

import pytest

from shared_schema.deploy.load import OwnDevices, load_deployment
from tests.docker.files import DOCKER

FILES = sorted((DOCKER / "deploy").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_deploy_file_fits_the_compose_files_volumes(file: Path) -> None:
    service = load_deployment(str(file)).service
    assert service.slab_folder == Path("/slab")
    assert service.internal_token_file == Path("/secrets/internal-token")
    assert (service.database_file == Path("/secrets/database")) is file.stem.endswith("_fleet")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_name_says_what_a_deploy_file_is(file: Path) -> None:
    deployment = load_deployment(str(file))
    small = file.stem.startswith(("tiny", "demo"))
    assert deployment.encoder.on_cpu is deployment.diffusion.on_cpu is small
    assert (deployment.nixl is not None) is file.stem.endswith("_nixl")
    assert (deployment.diffusion.defaults.num_inference_steps == 5) is ("_turbo" in file.stem)


def test_each_service_counts_its_gpus_from_0() -> None:
    file = str(DOCKER / "deploy" / "released.yaml")
    assert load_deployment(file, devices=OwnDevices(1, "0,1,2,3")).diffusion.devices == ("0", "1", "2", "3")
