"""What is cached where: prompt -> block hashes, the index of holders, the memory of what was routed."""
