"""Chat templates as families of models have them, cut down to what matters for tool calls and reasoning."""

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content }}
        {%- for c in m.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Qwen3: thinks unless told not to, and then the prompt holds empty thoughts.
QWEN3 = (
    HERMES
    + """
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
)

# DeepSeek R1 and its kind: the prompt opens the thoughts.
THINKER = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

LLAMA3 = """
{%- if tools %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\\n' }}{%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception("single tool-calls at once!") }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- m.role + ': ' + m.content + '\\n' }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL = """
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for c in m.tool_calls %}
            {%- if c.id | length != 9 %}{{- raise_exception("ids must have length 9") }}{%- endif %}
            {{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""

# gpt-oss: messages with channels; one call in a message, whose result follows.
HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- for t in tools %}{{- 'type ' + t.function.name + ';' }}{%- endfor %}{{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.content and m.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}
        {%- if m.content or m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set called.name = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'tool' %}
        {%- if called.name is none %}{{- raise_exception('no call before') }}{%- endif %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

_CHATML_REST = "{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}"
_CALLS = (
    "{%- for c in m.tool_calls or [] %}{{- '[call ' + c.function.name + ' ' + (c.function.arguments | tojson) + ']' }}"
    "{%- endfor %}"
)

# Templates that lose or refuse messages, each for one reason; their names say what published ones do so.
PECULIAR = {
    # DeepSeek R1, RWKV: of several system messages the last stays, wherever it stood
    "one system": """
{%- set ns = namespace(system='') %}
{%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- endif %}{%- endfor %}
{{- ns.system }}
{%- for m in messages %}{%- if m.role != 'system' %}{{- '[' + m.role + ']' + m.content }}"""
    + _CALLS
    + "{%- endif %}{%- endfor %}",
    # Qwen3.5: others are refused, and so is a conversation without a question
    "system first": """
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
{{- raise_exception('No user query found.') }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('Unexpected message role.') }}{%- endif %}
{{- '[' + m.role + ']' + m.content }}"""
    + _CALLS
    + "{%- endfor %}",
    # gpt-oss: a system message counts in the first place only, and thoughts vanish once there is an answer
    "first message only": """
{%- if messages[0].role in ['system', 'developer'] %}{{- '[instructions]' + messages[0].content }}{%- endif %}
{%- set last = namespace(answer=-1, call='') %}
{%- for m in messages %}{%- if m.role == 'assistant' and not m.tool_calls %}
{%- set last.answer = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[user]' + m.content }}
{%- elif m.role == 'tool' %}
{%- if not last.call %}{{- raise_exception('no call before') }}{%- endif %}{{- '[result]' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}
{%- if loop.index0 > last.answer %}{{- '[thoughts]' + (m.thinking or m.content or '') }}{%- endif %}
{%- set last.call = m.tool_calls[0].function.name %}
{{- '[call ' + last.call + ']' + (m.tool_calls[0].function.arguments | tojson) }}
{%- elif m.role == 'assistant' %}{{- '[answer]' + m.content }}{%- endif %}
{%- endfor %}""",
    # Gemma 2: no system, no tools, alternating roles
    "turns only": """
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{%- endif %}
{{- '<turn>' + m.role + '\\n' + (m.content | trim) }}
{%- endfor %}""",
    # Mistral Small: turns; calls and results do not count, and calls have neither text nor long ids
    "turns with calls": """
{%- set ns = namespace(users=true) %}
{%- if messages[0].role == 'system' %}{%- set rest = messages[1:] %}{{- '[SYSTEM]' + messages[0].content }}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != ns.users %}{{- raise_exception('conversation roles must alternate') }}{%- endif %}
{%- set ns.users = not ns.users %}{%- endif %}
{%- if m.tool_calls %}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + (c.function.arguments | tojson) }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content }}
{%- elif m.role in ['user', 'assistant'] %}{{- '[' + m.role + ']' + m.content }}
{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported!') }}{%- endif %}
{%- endfor %}""",
    # Mistral Nemo: the system's text stands in the last message, if that is the user's
    "system in the last": """
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}
{%- if loop.last and m.role == 'user' and system is defined %}{{- '[' + system + ']' }}{%- endif %}
{{- '[' + m.role + ']' + (m.content or '') }}"""
    + _CALLS
    + "{%- endfor %}",
    # DeepSeek R1 and V3: calls count only where content is null, and arguments are text
    "null beside calls": """
{%- for m in messages %}
{%- if m.role == 'assistant' and m.content is none %}
{%- for c in m.tool_calls %}{{- '<call>' + c.function.name + '\\n' + c.function.arguments + '</call>' }}{%- endfor %}
{%- else %}{{- '[' + m.role + ']' + m.content }}{%- endif %}
{%- endfor %}""",
    # DeepSeek V3.1, functionary
    "arguments as text": """
{%- for m in messages %}
{%- for c in m.tool_calls or [] %}CALL {{ c.function.name + ' ' + c.function.arguments }}{%- endfor %}
{{- m.content or '' }}|{%- endfor %}""",
    # Llama 3.2; Hermes leaves out texts beside calls
    "one call": """
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{{- '<' + m.role + '>' + (m.tool_calls[0].function | tojson) }}
{%- else %}{{- '<' + m.role + '>' + m.content }}{%- endif %}
{%- endfor %}""",
    # Ministral: reasoning is a part of type `thinking`
    "thinking parts": """
{%- for m in messages %}{{- '[' + m.role + ']' }}
{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for p in m.content or [] %}
{{- '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}{%- endfor %}
{%- endif %}"""
    + _CALLS
    + "{%- endfor %}",
    # multimodal ones: content is a list of parts
    "parts": """
{%- for m in messages %}{{- '[' + m.role + ']' }}
{%- for p in m.content or [] %}{{- p.text }}{%- endfor %}"""
    + _CALLS
    + "{%- endfor %}",
    # SmolLM3, Granite 3.3: calls of earlier turns are left out, results are kept
    "no calls": "{%- for m in messages %}" + _CHATML_REST + "{%- endfor %}",
    # Phi 3.5: other roles are left out
    "three roles": """
{%- for m in messages %}{%- if m.role in ['system', 'user', 'assistant'] and m.content %}
{{- '<|' + m.role + '|>' + m.content }}{%- endif %}{%- endfor %}""",
    # Hermes 2 Pro: tools must be a list
    "tools as a list": "{%- for t in tools %}{{- t.function.name }}{%- endfor %}{%- for m in messages %}"
    + _CHATML_REST
    + _CALLS
    + "{%- endfor %}",
    # Firefunction: variables of its own
    "functions": "{{- functions + datetime }}{%- for m in messages %}" + _CHATML_REST + _CALLS + "{%- endfor %}",
    # Command R+: results must say which tool they are of
    "named results": """
{%- for m in messages %}{{- '[' + m.role + ']' }}
{%- if m.role == 'tool' and not m.name %}{{- raise_exception('name is required') }}{%- endif %}{{- m.content or '' }}"""
    + _CALLS
    + "{%- endfor %}",
}
ALL = PECULIAR | {
    "hermes": HERMES,
    "qwen3": QWEN3,
    "thinker": THINKER,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "harmony": HARMONY,
}
