"""The Python SDK: `Client` and `AsyncClient`, their values and errors; everything a program needs is here.

with Client("127.0.0.1:7070") as client:
    session = client.create_session()
    for event in session.generate("What does a ferryman do?", max_tokens=64):
        if isinstance(event, Token):
            print(event.text, end="")
"""

from kvferry.client.errors import (
    BadRequest,
    BrokenSequence,
    ClientError,
    Conflict,
    NotFound,
    NotNow,
    Overloaded,
    ServerFault,
    TurnFailed,
    Unavailable,
)
from kvferry.client.sdk.aio import DEFAULT_ADDRESS, AsyncClient, AsyncSession
from kvferry.client.sdk.events import (
    Candidate,
    ConnectionLost,
    Finished,
    FinishReason,
    NodeLost,
    Placed,
    PrefixReport,
    Started,
    Token,
    TokenLogprob,
    TurnEvent,
)
from kvferry.client.sdk.forms import (
    AnswerForm,
    Choices,
    JsonObject,
    JsonSchema,
    OutputFormat,
    ParsedAnswer,
    Regex,
    Tool,
    ToolCall,
)
from kvferry.client.sdk.samples import AsyncSamples, SampleEvent
from kvferry.client.sdk.stored import SessionPlaces, StoredFile, StoredPrefix, StoredRows, StoredTree
from kvferry.client.sdk.sync import Client, Samples, Session, Turn
from kvferry.client.sdk.turn import Answer, AsyncTurn
from kvferry.client.sdk.values import (
    GREEDY,
    ClusterStatus,
    ExportedSession,
    Image,
    Message,
    ModelInfo,
    NodeInfo,
    NodeState,
    Sampling,
    SessionDetails,
    SessionInfo,
    StoreFigures,
    TurnInfo,
    TurnState,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "GREEDY",
    "Answer",
    "AnswerForm",
    "AsyncClient",
    "AsyncSamples",
    "AsyncSession",
    "AsyncTurn",
    "BadRequest",
    "BrokenSequence",
    "Candidate",
    "Choices",
    "Client",
    "ClientError",
    "ClusterStatus",
    "Conflict",
    "ConnectionLost",
    "ExportedSession",
    "FinishReason",
    "Finished",
    "Image",
    "JsonObject",
    "JsonSchema",
    "Message",
    "ModelInfo",
    "NodeInfo",
    "NodeLost",
    "NodeState",
    "NotFound",
    "NotNow",
    "OutputFormat",
    "Overloaded",
    "ParsedAnswer",
    "Placed",
    "PrefixReport",
    "Regex",
    "SampleEvent",
    "Samples",
    "Sampling",
    "ServerFault",
    "Session",
    "SessionDetails",
    "SessionInfo",
    "SessionPlaces",
    "Started",
    "StoreFigures",
    "StoredFile",
    "StoredPrefix",
    "StoredRows",
    "StoredTree",
    "Token",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Turn",
    "TurnEvent",
    "TurnFailed",
    "TurnInfo",
    "TurnState",
    "Unavailable",
]
