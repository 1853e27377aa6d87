"""How the demo checkpoint is made: stages that train it on the little world. No service imports this."""
