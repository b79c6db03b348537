"""State dicts in the layout of FSDP2 and DDP, for `torch.distributed.checkpoint` and everything else."""
