"""The command line client, the demo, and the pair of services as child processes."""
