"""What is kept of prompts that were computed: the index of their prefixes, and the payloads it stands for."""
