"""Small files in the formats of LEAF and TFF, written by their documentation: texts, counts and protocol buffers."""

import json
import sqlite3
import struct


def varint(value):
    """A whole number of 64 bits, seven in a byte, the lowest first; negative ones as two's complement."""
    value, found = value % 2**64, bytearray()
    while value > 127:
        found.append(value % 128 + 128)
        value //= 128
    return bytes([*found, value])


def field(number, content):
    """A field of bytes (wire type 2)."""
    return varint(8 * number + 2) + varint(len(content)) + content


def example(features, packed=True):
    """Serialized `tf.train.Example`: texts as bytes_list, floats as float_list, whole numbers as int64_list."""
    entries = b""
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, one) for one in values))
        elif isinstance(values[0], float):
            plain = [struct.pack("<f", one) for one in values]
            feature = field(2, field(1, b"".join(plain)) if packed else b"".join(b"\x0d" + one for one in plain))
        else:
            plain = [varint(one) for one in values]
            feature = field(3, field(1, b"".join(plain)) if packed else b"".join(b"\x08" + one for one in plain))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def write_sqlite(path, splits):
    """TFF's tables of {split: {client: [features of each example]}}, the splits of a client mixed."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
            "serialized_example_proto BLOB NOT NULL)"
        )
        connection.execute(
            "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, "
            "num_examples INTEGER NOT NULL)"
        )
        for split, clients in splits.items():
            for client, examples in clients.items():
                connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, len(examples)))
                rows = [(split, client, example(one)) for one in examples]
                connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    connection.close()


def write_leaf(folder, splits, per_file=2, left_out=0):
    """LEAF's files of {split: {user: (x, y)}}, a few users in each; Shakespeare's counts include rows left out."""
    for split, users in splits.items():
        (folder / split).mkdir(parents=True)
        names = list(users)
        for number in range(0, len(names), per_file):
            some = names[number : number + per_file]
            content = {
                "users": some,
                "num_samples": [len(users[name][1]) + left_out for name in some],
                "user_data": {name: {"x": users[name][0], "y": users[name][1]} for name in some},
            }
            (folder / split / f"all_data_{number}_niid_0_keep_0_{split}_9.json").write_text(json.dumps(content))
