"""Tests of a data set that use objects of the program's classes, which never leave its sandbox."""

import pytest

from laurel.extensions.code.sandbox.inside import plain_data
from laurel.extensions.code.sandbox.jobs import SandboxJob, Status
from laurel.extensions.code.sandbox.pool import SandboxPool

TREE = """
class Node:
    def __init__(self, value, left=None):
        self.value, self.left, self.right = value, left, None
    def depth(self):
        return 1 + max((one.depth() for one in (self.left, self.right) if one), default=0)
    def leftmost(self):
        return self if self.left is None else self.left.leftmost()
    def child(self):
        return Node(0)
    def __eq__(self, other):
        return True
    __hash__ = None
def depth(node):
    return 0 if node is None else node.depth()
def values(nodes):
    return [node.value for node in nodes]
def swap(nodes):
    nodes.reverse()
def make():
    return Node(7)
"""


@pytest.fixture(scope="module")
def pool(tier):
    with SandboxPool(tier=tier, num_workers=1) as pool:
        yield pool


def run(pool, test_code, code=TREE):
    job = SandboxJob(code=code, mode="tests", entry="depth", test_code=test_code)
    return pool.run([job])[0]


@pytest.mark.parametrize(
    "test_code",
    [
        "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\nassert depth(root) == 3",
        "assert depth(None) == 0\nassert depth(Node(1, Node(2))) == 2",
        "assert values([Node(5), Node(6)]) == [5, 6]",
        "assert values((Node(5), {'a': 1}.get('b') or Node(4))) == [5, 4]",
        "root = Node(1, left=Node(9))\nassert root.left.value == 9\nassert root.right is None",
        "root = Node([1])\nroot.value = [2, 3]\nassert root.value == [2, 3]",
        "root = Node(1, Node(2))\nassert root.depth() == 2\nassert root.left is root.left",
        "root = Node(1)\nassert root.leftmost() is root",
        "a, b = Node(1), Node(2)\nnodes = [a, b]\nswap(nodes)\nassert nodes == [b, a]",
        "try:\n    Node(1).missing\nexcept AttributeError:\n    pass\nelse:\n    raise ValueError",
        "try:\n    Node()\nexcept TypeError:\n    pass\nelse:\n    raise ValueError",
    ],
)
def test_objects_are_made_changed_and_passed(pool, test_code):
    result = run(pool, test_code)
    assert (result.status, result.tests[0].detail) == (Status.OK, "")


@pytest.mark.parametrize(
    ("test_code", "status"),
    [
        ("assert depth(Node(1)) == 2", Status.WRONG_ANSWER),
        ("root = Node(1)\nroot.value = 2\nassert root.value == 1", Status.WRONG_ANSWER),
        # Its class says that it is equal to everything; that is not asked.
        ("assert Node(1) == 5", Status.WRONG_ANSWER),
        ("assert Node(1) == Node(1)", Status.WRONG_ANSWER),
        ("assert Node(1)", Status.BAD_RESULT),
        ("assert abs(Node(1) - 5) < 1", Status.WRONG_ANSWER),
        ("assert len(Node(1)) == 0", Status.WRONG_ANSWER),
        # A function is to give data.
        ("assert make() is not None", Status.BAD_RESULT),
        ("assert Node(1).child() is not None", Status.BAD_RESULT),
    ],
)
def test_objects_are_no_answers(pool, test_code, status):
    assert run(pool, test_code).status is status


def test_a_number_that_nobody_gave_is_no_way_in(pool):
    """A program that answers with numbers of its own choice gets objects that say nothing."""
    forge = (
        "import os\n"
        "class Node: pass\n"
        "def depth(x):\n"
        '    os.write(4, b\'{"i": 1, "value": ["h", 0]}\\n\')\n'
        "    os._exit(0)\n"
    )
    assert run(pool, "assert depth(1) == 1", forge).status is Status.WRONG_ANSWER
    assert run(pool, "assert depth(1)", forge).status is Status.BAD_RESULT
    many = forge.replace("0]", "true]")
    assert run(pool, "assert depth(1) == 1", many).status is Status.BAD_RESULT


class Own:
    pass


def test_numbers_stand_for_objects_only_where_both_sides_agree():
    one, other = Own(), Own()
    numbers = {id(one): 3}
    sent = plain_data.dumps([1, {"a": (one,)}], lambda value: numbers.get(id(value)))
    assert plain_data.loads(sent, {3: one}.__getitem__) == [1, {"a": (one,)}]
    with pytest.raises(plain_data.NotPlainDataError):
        plain_data.loads(sent)
    with pytest.raises(plain_data.NotPlainDataError, match="Own"):
        plain_data.dumps([other], lambda value: numbers.get(id(value)))
    with pytest.raises(plain_data.NotPlainDataError, match="Own"):
        plain_data.dumps([one])
    for forged in (b'["h"]', b'["h", 1, 2]', b'["h", "3"]', b'["h", true]', b'["h", 4]'):
        with pytest.raises(plain_data.NotPlainDataError):
            plain_data.loads(forged, {3: one}.__getitem__)
