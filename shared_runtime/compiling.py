"""Compiling before anybody waits for it, and what is said where the compiler fails. Runs in ranks; torch."""

import logging
import time
from collections.abc import Callable

from torch._dynamo.exc import TorchDynamoException

from shared_schema.deploy.model import Stage
from shared_schema.errors import DeployError

logger = logging.getLogger(__name__)


def compile_now(what: str, work: Callable[[], None], stage: Stage, beat: Callable[[], None]) -> None:
    """Do `work`, which calls what is compiled at its first call, and say how long it took.

    Raises:
        DeployError: the compiler cannot do it here.
    """
    begun = time.perf_counter()
    try:
        work()
    except TorchDynamoException as error:
        logger.exception("compiling %s failed", what)
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DeployError(
            f"{what} could not be compiled ({why}): enforce_eager: true in stage {stage.stage_id} does without"
        ) from error
    beat()
    logger.info("compiled %s in %.1f s", what, time.perf_counter() - begun)
