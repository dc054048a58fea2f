"""The SDK inside the user's script: it speaks with the local agent, and with nobody else.

Light on purpose: no torch, no pydantic, nothing that a script would not have imported anyway.
"""
