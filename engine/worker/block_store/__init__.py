"""KV blocks outside the device: copies, the block file, the prefix-cache file."""
