"""Three scripted episodes for the tests of working memory: screenshots are named by the turn that first sees them."""

from mage_jax.agent.calls import ToolCall, turn_text
from mage_jax.agent.memory import PastTurn

FIRST = "screen1"
TASK = "Merge the files\nand save."


def gui(number):
    calls = [ToolCall(name="computer_use", action="click", coordinate=(number, 10 * number))]
    response = turn_text(think=f"Thought {number}.", action=f"Click {number}.", calls=calls)
    return PastTurn(
        response=response, action=f"Click {number}.", channel="computer_use", screenshot=f"screen{number + 1}"
    )


def bash(number, outputs=None):
    outputs = (f"out {number}\n",) if outputs is None else outputs
    calls = [ToolCall(name="bash", command=f"run {number} {i}") for i in range(len(outputs))]
    response = turn_text(think=f"Thought {number}.", action=f"Run {number}.", calls=calls)
    return PastTurn(response=response, action=f"Run {number}.", channel="bash", outputs=tuple(outputs))


EPISODES = {
    "gui": [gui(i) for i in range(1, 8)],
    # Turns 4 to 6 are three bash turns in a row: at turn 7 the newest screenshot answered the folded turn 3.
    "mixed": [gui(1), bash(2, ("a\nb", "")), gui(3), bash(4), bash(5), bash(6), gui(7)],
    "bash": [bash(i) for i in range(1, 8)],
}
