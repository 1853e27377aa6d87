"""The effective layout of a deployment: logged once at start, and shown in `/v1/models`. Pure."""

from shared_schema.deploy.model import Deployment
from shared_schema.deploy.served import unused_keys

Layout = dict[str, str | int]


def layout_of(deployment: Deployment) -> dict[str, Layout]:
    """What runs where, by stage, with every default resolved."""
    encoder, diffusion = deployment.encoder, deployment.diffusion
    parallel = diffusion.parallel_config
    roles = (
        [] if encoder.components is None else [(name, role) for name, role in encoder.components if role is not None]
    )
    return {
        "encoder": {
            "devices": ",".join(encoder.devices),
            "tensor_parallel_size": encoder.tensor_parallel_size,
            **{name: role.parallel_mode for name, role in roles},
            "load_format": encoder.load_format,
            "connector": deployment.connector,
        },
        "diffusion": {
            "devices": ",".join(diffusion.devices),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "ulysses_degree": parallel.ulysses_degree,
            "vae_patch_parallel_size": parallel.vae_patch_parallel_size,
            "split": "text-only" if diffusion.text_only else "full",
            "vae_decode_precision": diffusion.decode_precision,
            "load_format": diffusion.load_format,
        },
    }


def start_lines(deployment: Deployment) -> list[str]:
    """What a service logs once when it starts: the layout of each stage, and the keys that change nothing."""
    lines = [
        f"{stage}: {', '.join(f'{key} {value}' for key, value in layout.items())}"
        for stage, layout in layout_of(deployment).items()
    ]
    unused = unused_keys(deployment)
    return [*lines, f"read and without effect: {', '.join(unused)}"] if unused else lines
