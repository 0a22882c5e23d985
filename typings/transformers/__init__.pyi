# The names of transformers that oxRL imports, for the type checker alone: the library's own file
# names what is in hundreds of models, and reading them takes longer than checking oxRL.
from transformers.cache_utils import (
    Cache as Cache,
)
from transformers.cache_utils import (
    DynamicCache as DynamicCache,
)
from transformers.configuration_utils import (
    PreTrainedConfig as PreTrainedConfig,
)
from transformers.generation.configuration_utils import (
    GenerationConfig as GenerationConfig,
)
from transformers.modeling_utils import (
    AttentionInterface as AttentionInterface,
)
from transformers.modeling_utils import (
    PreTrainedModel as PreTrainedModel,
)
from transformers.models.auto.configuration_auto import (
    AutoConfig as AutoConfig,
)
from transformers.models.auto.image_processing_auto import (
    AutoImageProcessor as AutoImageProcessor,
)
from transformers.models.auto.modeling_auto import (
    AutoModel as AutoModel,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM as AutoModelForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForImageTextToText as AutoModelForImageTextToText,
)
from transformers.models.auto.tokenization_auto import (
    AutoTokenizer as AutoTokenizer,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil as Qwen2VLImageProcessorPil,
)
from transformers.models.qwen3.configuration_qwen3 import (
    Qwen3Config as Qwen3Config,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM as Qwen3ForCausalLM,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import (
    Qwen3VLConfig as Qwen3VLConfig,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration as Qwen3VLForConditionalGeneration,
)
from transformers.tokenization_utils_base import (
    PreTrainedTokenizerBase as PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
from transformers.utils.quantization_config import (
    BitsAndBytesConfig as BitsAndBytesConfig,
)
from transformers.utils.quantization_config import (
    GgufConfig as GgufConfig,
)
