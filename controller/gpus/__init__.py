"""The cards of this machine: what NVML says of them, how they fail, and how they are cut up."""
