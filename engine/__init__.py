"""Requests, scheduling, memory, layers and models; the offline `LLM`."""

from engine.llm import LLM, CompletionOutput, RequestOutput
from engine.request import FinishReason, SamplingParams, TokenLogprob

__all__ = [
    "LLM",
    "CompletionOutput",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
]
