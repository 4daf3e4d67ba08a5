"""Chats whose second question has the first one's template, for tests.bench.copies.

    pip install --no-deps reasoning-gym
    python -m tests.bench.copy_chats CHATS.jsonl [--seed 777]

One chat for each of the 85 templates of recipes.word_problems, answered by the pair that ships.
"""

import argparse
import json
from pathlib import Path

import dspine_mlx
from recipes.word_problems import questions, templates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--seed", type=int, default=777)
    args = parser.parse_args()
    model, tokenizer, drafter = dspine_mlx.load()
    count = len(templates())
    asked = list(questions(2 * count, args.seed))  # of all templates in turn
    with args.chats.open("x", encoding="utf-8") as file:
        for first, second in zip(asked[:count], asked[count:], strict=True):
            messages = [{"role": "user", "content": first}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            answer = dspine_mlx.generate(model, tokenizer, prompt, drafter, max_tokens=160)
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": second})
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
