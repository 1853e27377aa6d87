"""LoRA files: found by name or path, and bound to a transformer tensor by tensor, before any rank sees them."""
