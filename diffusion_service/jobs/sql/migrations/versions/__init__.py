"""The steps. A new one names the newest as its `down_revision`."""
