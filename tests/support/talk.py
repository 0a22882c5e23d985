"""An environment whose episodes differ in length: for tests of episodes that end when they may."""

TALK = """
import random
from oxrl.environments import Step

class Talk:
    reusable = True
    def __init__(self, ends=0.3):
        self.ends = ends
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        return f"{prompt.messages[0]['content']} {self.chance.randint(0, 9)}"
    def step(self, text):
        done = self.chance.random() < self.ends
        return Step(f"go on {self.chance.randint(0, 9)}", reward=len(set(text)) / 10, terminated=done)
"""
