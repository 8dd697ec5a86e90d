"""Join VQAv2's two official files: a line of JSON for each question.

python examples/join_vqav2.py QUESTIONS.json ANNOTATIONS.json OUT.jsonl
"""

import json
import sys
from pathlib import Path


def main(questions: str, annotations: str, output: str) -> None:
    asked = json.loads(Path(questions).read_text())
    answered = json.loads(Path(annotations).read_text())["annotations"]
    answers = {one["question_id"]: one["multiple_choice_answer"] for one in answered}
    folder = asked["data_subtype"]  # train2014
    with open(output, "w") as lines:
        for one in asked["questions"]:
            record = {
                "id": one["question_id"],
                "image": f"{folder}/COCO_{folder}_{one['image_id']:012}.jpg",
                "question": one["question"],
                "answer": answers[one["question_id"]],
            }
            lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
