"""Systems code behind two small interfaces: training and rollout. Maths and loops do not belong
here.
"""
