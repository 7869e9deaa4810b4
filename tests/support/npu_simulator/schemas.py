"""The vendor's signatures of the simulated operators, and where each contract is written.

The signatures are those that torch-npu registers, 2.13.0 and 2.14.0 the same;
`tests/fast/ascend/test_vendor_schemas.py` compares them with its library. Documents, by the names
their publisher gives them: op-plugin's `torch_npu-NAME` for each operator, and CANN's, which are
more exact where they differ:

    npu_moe_init_routing_v2     aclnnMoeInitRoutingV3, which it calls
    npu_grouped_matmul          aclnnGroupedMatmulV5
    npu_moe_finalize_routing    aclnnMoeFinalizeRoutingV2
    npu_format_cast             data formats: FRACTAL_NZ
"""

from __future__ import annotations

SCHEMAS = {
    text.partition("(")[0]: text
    for text in (
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
        "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
        "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, "
        "int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
        "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
        "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
        "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
        "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
        "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None)"
        " -> Tensor[]",
        "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
        "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, "
        "Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row, "
        "Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) -> Tensor",
        "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, "
        "Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1)"
        " -> (Tensor, Tensor, Tensor)",
        "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, "
        "int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
        "float eps=1e-20) -> (Tensor, Tensor, Tensor)",
        "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, "
        "int? input_dtype=None) -> Tensor",
    )
}
