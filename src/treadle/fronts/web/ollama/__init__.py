"""Ollama's API, for tools that speak no other: chat, generate, and the routes about models."""
