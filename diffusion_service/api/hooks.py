"""Whether the end of a job may be told to the URL that a request names. Pure; runs in the API process."""

from diffusion_service.api.limits import ServerLimits
from diffusion_service.jobs.webhook import Webhook
from diffusion_service.outbound import check_url
from shared_schema.errors import InvalidRequest, NotServed, OutboundRefused

PARAM = "webhook_url"


def read_webhook(url: str | None, limits: ServerLimits) -> Webhook | None:
    """The webhook of a request that asks for one.

    Raises:
        NotServed: this server tells nobody.
        InvalidRequest: it does not tell that host.
    """
    if url is None:
        return None
    if not limits.webhook_hosts:
        raise NotServed("webhooks are off: this server's deploy file allows no host", param=PARAM)
    try:
        check_url(url, limits.webhook_hosts)
    except OutboundRefused as error:
        raise InvalidRequest(f"webhook_url: {error.message}", param=PARAM) from error
    return Webhook(url=url)
